#include <string>
#include <vector>

#include "apps/verify/model_walk.hpp"
#include "cpu_ref/model.hpp"
#include "golden/checkpoint/model_source.hpp"
#include "golden/file/model_golden.hpp"
#include "tests/golden/golden_files.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

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
  Result<ModelWalk> walk = walk_model(*file, *weights, {.activation = activation, .one_by_one = one_by_one});
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

Result<checkpoint::LoadedModel> load_checkpoint(const std::string& name) {
  CF_TRY_ASSIGN(const auto source, checkpoint::ModelSource::open({.directory = CF_DATA_DIR "/checkpoints/" + name}));
  return source.load();
}

/// The float backend with logits of 16 bits, each times `factor`.
class Rounded final : public ModelRunner {
 public:
  Rounded(std::unique_ptr<ModelRunner> inner, DType dtype, double factor)
      : inner_(std::move(inner)), dtype_(dtype), factor_(factor) {}
  const ModelSpec& model() const override { return inner_->model(); }
  std::int64_t slots() const override { return inner_->slots(); }
  std::int64_t capacity() const override { return inner_->capacity(); }
  DType activation() const override { return dtype_; }
  std::int64_t length(std::int64_t slot) const override { return inner_->length(slot); }
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override {
    return inner_->run(runs, ids, logits);
  }
  std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) override { return inner_->choose(draws); }
  Result<Tensor> logits(std::int64_t slot) override {
    CF_TRY_ASSIGN(Tensor made, inner_->logits(slot));
    for (std::int64_t i = 0; i < made.size(); ++i) made.as<float>()[i] *= float(factor_);
    return made.converted(dtype_);
  }
  void release(std::int64_t slot) override { inner_->release(slot); }
  void watch(Visit visit) override { inner_->watch(std::move(visit)); }
  void check_between(Check check) override { inner_->check_between(std::move(check)); }
  Status fetch(const SiteTensor& tensor, void* to) override { return inner_->fetch(tensor, to); }

 private:
  std::unique_ptr<ModelRunner> inner_;
  DType dtype_;
  double factor_;
};

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

TEST_CASE("A GPU walks a model in the weights' dtype alone", "[model_golden]") {
  const auto file = golden::ModelGolden::open(CF_DATA_DIR "/golden_model/neox-gptq-sym-16.h5");
  REQUIRE(file);
  const auto weights = file->weights();
  REQUIRE(weights);
  const auto walk = walk_model(*file, *weights, {.backend = Backend::cuda, .activation = DType::f32});
  CHECK(test::refusal_fault(
            walk.status(), Code::invalid_argument,
            {"neox-gptq-sym-16.h5: expected activations of float16 on a GPU, the weights', got float32"}) == "");
}

TEST_CASE("The oracle makes the same taps of chunks", "[model_golden]") {
  for (const char* name : {"neox-d80", "neox-gptq-desc-act"}) {
    const auto file = golden::ModelGolden::open(CF_DATA_DIR "/golden_model/" + std::string(name) + "-16.h5");
    REQUIRE(file);
    const auto weights = file->weights();
    REQUIRE(weights);
    const auto walk = walk_model(*file, *weights, {.chunk = 5});
    REQUIRE(walk);
    CHECK(walk->ok());
    CHECK(walk->taps.size() == 5);
  }
}

TEST_CASE("A generation is checked within the budget of its runner's dtype, and a wrong logit or id is found",
          "[model_golden]") {
  const auto loaded = load_checkpoint("neox-d80");
  REQUIRE(loaded);
  const std::vector<std::int32_t> prompt{1, 2, 3};
  const auto check = [&](DType dtype, double factor, const std::vector<std::int32_t>& ids) {
    auto model = cpu_ref::Model::create(loaded->config, loaded->weights, loaded->owner, {.slots = 2, .capacity = 20});
    REQUIRE(model);
    std::unique_ptr<ModelRunner> runner = std::move(*model);
    if (dtype != DType::f32) runner = std::make_unique<Rounded>(std::move(runner), dtype, factor);
    auto checked = check_generation(*runner, loaded->weights, loaded->owner, prompt, ids, {});
    REQUIRE(checked);
    return *checked;
  };
  auto made = cpu_ref::Model::create(loaded->config, loaded->weights, loaded->owner, {.capacity = 20});
  REQUIRE(made);
  Decoder decoder(std::move(*made));
  const auto sequence = decoder.add(prompt, {.max_new_tokens = 6});
  REQUIRE(sequence);
  REQUIRE(decoder.decode(6));
  const std::vector<std::int32_t> ids = *decoder.ids(*sequence);
  REQUIRE(ids.size() == 6);
  double last = 0;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    CAPTURE(to_string(dtype));
    const GenerationCheck ours = check(dtype, 1, ids);
    CHECK(ours.ok());
    CHECK(ours.chosen == 6);
    CHECK(ours.budget.rel_l2 > last);
    // Each site of two layers stores once; what the sums in float32 add is little beside 16-bit stores.
    const double stores = double(names_of(loaded->config).sites().size() * 2 + 1) * unit_roundoff(dtype);
    CHECK(ours.budget.rel_l2 >= stores);
    if (dtype != DType::f32) {
      CHECK(ours.budget.rel_l2 < 1.1 * stores);
      CHECK_FALSE(check(dtype, 1 + 2 * stores, ids).ok());
    }
    last = ours.budget.rel_l2;
  }
  std::vector<std::int32_t> wrong = ids;
  wrong.back() = (wrong.back() + 64) % 128;
  const GenerationCheck other = check(DType::f16, 1, wrong);
  CHECK(other.same == 5);
  CHECK_FALSE(other.ok());
}
