// linear_sum of dense weights on the GPU: the oracle's sums within the budget, and the bits of the two products one
// after the other, in every run.
#include <tuple>

#include "cuda/ops/kernel.hpp"
#include "tests/cuda/device_check.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Dims = ops::LinearSum::Dims;

Setup setup_of(DType activation, Fill fill = Fill::normal) {
  Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .fill = fill};
  s.weight = s.values = activation;
  return s;
}

/// Both outputs of a problem.
std::vector<std::byte> outputs_of(Problem<ops::LinearSum>& p) {
  std::vector<std::byte> all;
  for (auto& block : p.blocks())
    if (block.role == Role::output) all.insert(all.end(), block.memory.begin(), block.memory.end());
  return all;
}

/// Compares a call's outputs with those of its parts, bit by bit.
void check_parts(const Setup& s, const Dims& d, cuda::Context& c) {
  INFO(describe(s) << ": " << d.tokens << " tokens, " << d.in << " and " << d.in2 << " to " << d.out);
  DeviceProblem<ops::LinearSum> fused(s, {d, {}}), apart(s, {d, {}});
  const auto choice = cuda::choose(cuda::Target{.arch = c.arch()}, fused.args());
  REQUIRE(choice);
  CHECK(choice->kernel == "linear_sum_wgmma");
  const std::vector<std::byte> sums = outputs_of(fused.run(c));
  REQUIRE(ops::LinearSum::for_each_part(apart.args(), [&](const ops::Linear::Args& part) {
    const auto of_part = cuda::choose(cuda::Target{.arch = c.arch()}, part);
    CHECK(of_part->kernel == "wgmma");
    return cuda::run(part, c);
  }));
  CHECK((outputs_of(apart.fetch()) == sums));
}

}  // namespace

TEST_CASE("linear_sum of dense weights on the GPU agrees with the oracle", "[gpu][linear][small]") {
  cuda::Context c = context();
  if (!c.arch().has_wgmma()) return;
  for (DType dtype : {DType::f16, DType::bf16})
    for (Fill fill : {Fill::normal, Fill::heavy_tailed})
      for (const bool residual : {true, false})
        for (std::int64_t tokens : {9, 16, 31, 64, 65, 128})
          for (auto [in, in2, out] :
               {std::tuple<std::int64_t, std::int64_t, std::int64_t>{64, 264, 136}, {512, 2048, 128}, {8, 8, 8}}) {
            const Setup s = setup_of(dtype, fill);
            INFO(describe(s) << ": " << tokens << " tokens, " << in << " and " << in2 << " to " << out);
            DeviceProblem<ops::LinearSum> p(s, {{tokens, in, in2, out, residual}, {}});
            Problem<ops::LinearSum> reference(s, {{tokens, in, in2, out, residual}, {}}), oracle(reference, DType::f64);
            REQUIRE(cpu_ref::run(oracle.args()));
            const auto condition = cpu_ref::condition(oracle.args());
            REQUIRE(condition);
            const Budget budget = ops::LinearSum::budget(oracle.dims(), {DType::f32, dtype}, *condition);
            Problem<ops::LinearSum>& got = p.run(c);
            int outputs = 0;
            for (std::size_t i = 0; i < got.blocks().size(); ++i) {
              if (got.blocks()[i].role != Role::output) continue;
              ++outputs;
              const auto result = compare(got.tensor(got.blocks()[i]), oracle.tensor(oracle.blocks()[i]));
              REQUIRE(result);
              INFO(got.blocks()[i].name << ": relative L2 " << result->rel_l2 << ", relative max " << result->rel_max);
              CHECK(result->within(budget));
            }
            CHECK(outputs == 2);
          }
}

TEST_CASE("linear_sum of dense weights on the GPU has the bits of its parts", "[gpu][linear][classes]") {
  cuda::Context c = context();
  if (!c.arch().has_wgmma()) return;
  for (DType dtype : {DType::f16, DType::bf16}) {
    for (std::int64_t tokens = 9; tokens <= 128; tokens += tokens < 20 ? 1 : 9)
      check_parts(setup_of(dtype), {tokens, 512, 2048, 520}, c);
    for (std::int64_t tokens : {16, 32, 50, 64, 128})
      for (auto [in, in2, out] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{2560, 10240, 2560},
                                  {1024, 4096, 1024},
                                  {4096, 16384, 4096}})
        check_parts(setup_of(dtype), {tokens, in, in2, out, tokens != 50}, c);
  }
}

TEST_CASE("linear_sum of dense weights on the GPU makes the same bits a thousand times", "[gpu][linear][reruns]") {
  cuda::Context c = context();
  if (!c.arch().has_wgmma()) return;
  for (std::int64_t tokens : {16, 64, 128}) {
    DeviceProblem<ops::LinearSum> p(setup_of(DType::f16), {{tokens, 1024, 4096, 1024}, {}});
    const std::vector<std::byte> first = outputs_of(p.run(c));
    cuda::LaunchList launches(c);
    REQUIRE(cuda::prepare(p.args(), launches));
    for (int i = 0; i < 10; ++i) {
      for (int j = 0; j < 100; ++j) REQUIRE(launches.submit(c.stream(), {.early = j % 2 == 1}));
      CHECK((outputs_of(p.fetch()) == first));
    }
  }
}
