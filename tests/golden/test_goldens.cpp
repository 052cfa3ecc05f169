// Every golden file in data/, against the CPU backend.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "apps/verify/golden_walk.hpp"
#include "tests/golden/golden_files.hpp"
#include "tests/support/catch.hpp"

using namespace cf;

TEST_CASE("every golden file in data: Hugging Face's float64 is met at every tap") {
  struct Case {
    const char* what;
    apps::WalkOptions options;
    double budget;
  };
  const Case cases[] = {
      {"the oracle, site by site", {.activation = DType::f64, .isolated = true}, 1e-11},
      {"the oracle, chained", {.activation = DType::f64, .isolated = false}, 1e-11},
      {"the oracle with its own table, site by site", {.isolated = true, .own_rope_table = true}, 1e-6},
      {"the oracle with its own table, chained", {.isolated = false, .own_rope_table = true}, 1e-6},
      {"the float backend, site by site", {.activation = DType::f32, .isolated = true}, 2e-6},
      {"the float backend, chained", {.activation = DType::f32, .isolated = false}, 2e-6},
  };
  const std::vector<std::string> paths = test::golden_files();
  CHECK_FALSE(paths.empty());
  std::set<std::string> quantised, with_weights;  // checkpoints
  for (const std::string& path : paths) {
    const auto file = golden::GoldenFile::open(path);
    CAPTURE(path, file.status().message());
    REQUIRE(file);
    const auto weights = file->weights();
    CAPTURE(weights.status().message());
    REQUIRE(weights);
    std::size_t weight_taps = 0;
    for (const golden::VariantInfo& v : file->variants())
      weight_taps +=
          std::size_t(std::ranges::count_if(v.taps, [](const auto& tap) { return tap.ends_with(".weight"); }));
    const std::size_t linears = test::quantised_linears(weights->weights);
    CHECK((weight_taps == 0 || weight_taps == linears));
    if (linears > 0) quantised.insert(file->meta().weights_checkpoint);
    if (weight_taps > 0) with_weights.insert(file->meta().weights_checkpoint);
    for (const Case& c : cases) {
      CAPTURE(c.what);
      const auto rows = apps::walk_golden(*file, *weights, c.options);
      CAPTURE(rows.status().message());
      REQUIRE(rows);
      // The walk has twelve taps, and one of the heads' norm; each dequantised weight that the file holds is one more.
      CHECK(rows->size() == (file->meta().config.family().head_norm ? 13 : 12) + weight_taps);
      for (const apps::TapResult& r : *rows) {
        CAPTURE(r.tap, r.worst);
        CHECK(r.error.non_finite == 0);
        CHECK(r.error.rel_l2 <= c.budget);
        if (r.tap.ends_with(".weight")) CHECK(r.error.max_abs == 0);
      }
    }
  }
  // One file of each quantised checkpoint is enough to hold its weights.
  CHECK_FALSE(quantised.empty());
  CHECK(quantised == with_weights);
}
