#include <string>
#include <vector>

#include "apps/verify/model_walk.hpp"
#include "golden/model_golden.hpp"
#include "tests/golden/golden_files.hpp"
#include "tests/support/catch.hpp"

namespace {

using namespace cf;
using namespace cf::apps;

std::vector<std::string> model_files() { return test::golden_files("golden_model"); }

bool is_long(const std::string& path) { return path.find("-512") != path.npos; }

/// Walks a file, and requires of every tap that it is within its bound.
ModelWalk walked(const std::string& path, DType activation, bool one_by_one) {
  const auto file = golden::ModelGolden::open(path);
  INFO(path << " " << file.status().message());
  REQUIRE(file);
  const auto weights = file->weights();
  INFO(weights.status().message());
  REQUIRE(weights);
  Result<ModelWalk> walk = walk_model(*file, *weights, activation, one_by_one);
  INFO(walk.status().message());
  REQUIRE(walk);
  for (const TapResult& r : walk->taps) {
    INFO(r.tap << " of " << r.site << ": " << r.error.rel_l2 << ", bound " << r.budget << ", worst at " << r.worst);
    CHECK(r.ok());
  }
  CHECK(walk->chosen == file->meta().tokens - file->meta().prompt_len);
  CHECK(walk->taps.size() >= (is_long(path) ? 1 : 4));
  return std::move(*walk);
}

}  // namespace

TEST_CASE("The oracle agrees with Hugging Face's float64 on every whole model's golden file", "[model_golden]") {
  const auto paths = model_files();
  REQUIRE(paths.size() > 10);
  std::int64_t positions = 0;
  for (const std::string& path : paths) {
    CAPTURE(path);
    const ModelWalk walk = walked(path, DType::f64, false);
    CHECK(walk.same == walk.chosen);
    positions += golden::ModelGolden::open(path)->meta().fed();
  }
  CHECK(positions > 1000);
}

TEST_CASE("The oracle decodes token by token what Hugging Face does in one pass", "[model_golden]") {
  for (const std::string& path : model_files()) {
    if (is_long(path) || path.find("pythia") != path.npos) continue;
    CAPTURE(path);
    const ModelWalk walk = walked(path, DType::f64, true);
    CHECK(walk.same == walk.chosen);
  }
}

TEST_CASE("The float backend is within its derived bound, and never further than Hugging Face's own 16 bits",
          "[model_golden]") {
  for (const std::string& path : model_files()) {
    CAPTURE(path);
    const ModelWalk walk = walked(path, DType::f32, false);
    CHECK(walk.same + walk.excused == walk.chosen);
    for (const TapResult& r : walk.taps) {
      CAPTURE(r.tap);
      CHECK(!r.producer_rel_l2.empty());
      for (const auto& [variant, error] : r.producer_rel_l2) {
        // A float32 checkpoint's own runs round as often as the float backend does.
        if (variant.starts_with("float32")) continue;
        CAPTURE(variant);
        CHECK(r.error.rel_l2 <= error);
      }
    }
  }
}
