// The programs' GPU side: every golden file against Hugging Face's float64, the timer, and cf-layer as its users meet it.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "apps/device_timer.hpp"
#include "apps/golden_walk.hpp"
#include "cuda/cuda.hpp"
#include "tests/catch.hpp"

using namespace cf;

TEST_CASE("every golden file in data: the GPU meets Hugging Face's float64 at every tap", "[gpu][golden]") {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(CF_DATA_DIR))
    if (entry.path().extension() == ".h5") paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  REQUIRE_FALSE(paths.empty());
  for (const std::string& path : paths) {
    const auto file = golden::GoldenFile::open(path);
    CAPTURE(path, file.status().message());
    REQUIRE(file);
    const auto weights = file->weights();
    CAPTURE(weights.status().message());
    REQUIRE(weights);
    for (DType activation : {file->meta().dtype, DType::f32})
      for (bool isolated : {true, false}) {
        CAPTURE(to_string(activation), isolated);
        const auto rows = apps::walk_golden(
            *file, *weights, {.backend = apps::Backend::cuda, .activation = activation, .isolated = isolated});
        CAPTURE(rows.status().message());
        REQUIRE(rows);
        CHECK(rows->size() == 12);
        for (const apps::TapResult& r : *rows) {
          CAPTURE(r.tap, r.worst, r.error.rel_l2, r.budget);
          CHECK(r.ok());
          // A bound that a fault could hide in would be none: some roundings of the activation, not more.
          CHECK(r.budget < 16 * unit_roundoff(activation) + 1e-4);
        }
      }
  }
}
