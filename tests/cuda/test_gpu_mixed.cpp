// Mixed steps on the GPU: a call of runs is one launch, or one for each group of equal runs.
#include <cmath>
#include <tuple>

#include "tests/cuda/device_check.hpp"
#include "tests/support/mixed_steps.hpp"
#include "tests/support/op_test_case.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using WithRuns = std::tuple<ops::KvAppend, ops::RopeAppend, ops::Attention, ops::LnQkv, ops::LnQkvHeads>;

std::vector<ModelConfig> models(std::string_view op) {
  std::vector<ModelConfig> all{model_of(4, 64, 16, 24), model_of(2, 80, 20, 24)};
  // With four heads the plan splits the keys of one run as it splits those of several, so that their bits are equal.
  const std::int64_t heads = op == ops::Attention::name ? 4 : 8;
  if (op != ops::LnQkv::name) all.push_back(gated_model_of(ModelType::llama, heads, 2, 128, 64, 40));
  return all;
}

}  // namespace

OP_TEST_CASE("On the GPU runs of 1, 5 and 300 rows in one call are each what it is by itself", "[gpu][runs]",
             WithRuns) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (const ModelConfig& model : models(TestType::name)) {
      const Setup s = mixed_setup(model, activation);
      INFO(TestType::name << ": " << describe(s));
      std::vector<cuda::Context> all;
      for (const cuda::Context& c : contexts()) all.insert(all.end(), 2, c);
      for (std::size_t i : {1, 3}) all[i].set_plan_arch(cuda::invariant_arch(all[i].arch()));
      for (cuda::Context& c : all) {
        DeviceProblem<TestType> together(s), apart(s);
        const std::vector<std::byte> got = together.run(c).bytes();
        const Status status = each_by_itself(apart.args(), [&](const auto& part) { return cuda::run(part, c); });
        INFO(status.message());
        REQUIRE(status);
        const bool same = got == apart.fetch().bytes();
        CHECK(same);
      }
    }
}

OP_TEST_CASE("On the GPU runs of 1, 5 and 300 rows agree with the oracle", "[gpu][runs]", WithRuns) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (const ModelConfig& model : models(TestType::name)) {
      const Setup s = mixed_setup(model, activation);
      CHECK(check_on_device<TestType>(s, example_of<TestType>(s)));
    }
}

TEST_CASE("On the GPU a layer takes runs of 1, 5 and 300 rows in one call", "[gpu][runs]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (const ModelConfig& model : {model_of(2, 80, 20, 40), gated_model_of(ModelType::llama, 4, 2, 64, 64, 40)}) {
      const Setup s = mixed_setup(model, activation);
      CHECK(check_on_device<ops::DecodeLayer>(s, example_of<ops::DecodeLayer>(s)));
    }
}

TEST_CASE("On the GPU an idle sequence keeps its cache and its results are NaN, and the others do not see it",
          "[gpu][runs]") {
  for (std::int64_t q_len : {1, 2, 20}) {
    const Setup s{.model = model_of(2, 80, 20, 24),
                  .load = {.batch = 3, .q_len = q_len, .kv_len = 40, .capacity = 41},
                  .activation = DType::f16,
                  .weight = DType::f16,
                  .values = DType::f16};
    cuda::Context c = context();
    const auto with_idle = [](auto& problem) {
      for (auto& b : problem.blocks())
        if (b.role == Role::length) static_cast<std::int32_t*>(b.data())[1] = kIdleLength;
    };
    Problem<ops::Attention> host(s);
    with_idle(host);
    DeviceProblem<ops::Attention> some(host), all(s);
    auto &got = some.run(c), &expected = all.run(c);
    const std::int64_t rows = q_len * 2 * 80;
    for (std::size_t i = 0; i < got.blocks().size(); ++i)
      if (got.blocks()[i].role == Role::output) {
        const Tensor y = got.tensor(got.blocks()[i]), of_all = expected.tensor(expected.blocks()[i]);
        std::int64_t wrong = 0;
        for (std::int64_t e = 0; e < 3 * rows; ++e)
          wrong += e / rows == 1 ? !std::isnan(y.at(e)) : y.at(e) != of_all.at(e);
        CHECK(wrong == 0);
      }
    Problem<ops::RopeAppend> to_append(s);
    with_idle(to_append);
    Problem<ops::RopeAppend> reference(to_append, DType::f64);
    REQUIRE(cpu_ref::run(reference.args()));
    DeviceProblem<ops::RopeAppend> append(to_append);
    auto& appended = append.run(c);
    for (std::size_t i = 0; i < appended.blocks().size(); ++i)
      if (appended.blocks()[i].role == Role::state) {
        const Tensor cache = appended.tensor(appended.blocks()[i]),
                     want = reference.tensor(reference.blocks()[i]).converted(DType::f16);
        const std::int64_t sequence = 2 * 41 * 80;
        std::int64_t wrong = 0;
        for (std::int64_t e = sequence; e < 2 * sequence; ++e) {
          const double x = cache.at(e), y = want.at(e);
          wrong += std::isnan(x) != std::isnan(y) || (!std::isnan(x) && x != y);
        }
        CHECK(wrong == 0);
      }
  }
}
