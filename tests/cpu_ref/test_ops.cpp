// Every op that has a contract: the float backend against the double oracle within the derived budget, guards and
// poison intact, the same bits on every run and for every number of threads.
#include <omp.h>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/op_state.hpp"
#include "tests/support/op_test_case.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::test;

namespace {

template <class Op>
void require_run(Problem<Op>& p) {
  const Status s = cpu_ref::run(p.args());
  INFO(s.message());
  REQUIRE(s);
  INFO("guard of " << p.broken_guard());
  REQUIRE(p.broken_guard().empty());
}

template <class Op>
Budget budget_of(Problem<Op>& p, DType compute, DType output) {
  const auto condition = cpu_ref::condition(p.args());
  INFO(condition.status().message());
  REQUIRE(condition);
  return Op::budget(p.dims(), {.compute = compute, .output = output}, *condition);
}

/// Runs the float backend and the oracle on the same numbers and holds every written tensor against the budget.
template <class Op>
void check_against_oracle(const Setup& s, const std::pair<typename Op::Dims, typename Op::Args>& sizes) {
  Setup exact = s;
  exact.activation = DType::f64;
  Problem<Op> got(s, sizes), reference(exact, sizes), untouched(s, sizes);
  require_run(got);
  require_run(reference);
  const Budget budget = budget_of(reference, DType::f32, s.activation);
  for (std::size_t i = 0; i < got.blocks().size(); ++i) {
    auto& block = got.blocks()[i];
    if (block.role == Role::state) check_state(untouched, got, reference, i, budget);
    if (block.role != Role::output) continue;
    const auto c = compare(got.tensor(block), reference.tensor(reference.blocks()[i]));
    REQUIRE(c);
    INFO(block.name << ": relative L2 " << c->rel_l2 << " (budget " << budget.rel_l2 << "), relative max " << c->rel_max
                    << " (budget " << budget.rel_max << ") at " << c->worst_coordinate);
    CHECK(c->non_finite == 0);
    CHECK(c->within(budget));
  }
}

template <class Op>
void check_repeats(const Setup& s) {
  std::vector<std::byte> first;
  for (int threads : {1, 1, 2, 3}) {
    Problem<Op> p(s);
    omp_set_num_threads(threads);
    require_run(p);
    if (first.empty()) first = p.bytes();
    CHECK(p.bytes() == first);
  }
  omp_set_num_threads(omp_get_num_procs());
}

}  // namespace

OP_TEST_CASE("The float backend agrees with the oracle within the derived budget", "[ops]", ops::Contracts) {
  for (const Setup& s : setups(DType::f32)) {
    INFO(TestType::name << ": " << describe(s));
    check_against_oracle<TestType>(s, example_of<TestType>(s));
  }
}

OP_TEST_CASE("The bits do not depend on the run or on the number of threads", "[ops]", ops::Contracts) {
  for (DType activation : {DType::f64, DType::f32})
    for (const Setup& s : setups(activation)) {
      INFO(TestType::name << ": " << describe(s));
      check_repeats<TestType>(s);
    }
}

TEST_CASE("embedding: a table of learned positions", "[ops][embedding]") {
  for (DType weight : {DType::f16, DType::bf16, DType::f32, DType::f64})
    for (std::int64_t hidden : {1, 7, 64, 301}) {
      Setup s{.model = model_of(1, 2, 2, 2), .load = {.batch = 3, .q_len = 2, .kv_len = 9}, .weight = weight};
      s.values = weight == DType::bf16 ? DType::bf16 : DType::f16;
      INFO("hidden " << hidden << ", weight " << to_string(weight));
      check_against_oracle<ops::Embedding>(s, {{6, 37, hidden, 12}, {}});
    }
}

TEST_CASE("qk_norm: every dtype, layout and odd size", "[ops][qk_norm]") {
  using ops::QkvLayout;
  for (DType weight : {DType::f16, DType::bf16, DType::f32, DType::f64})
    for (const auto& [heads, kv_heads, layout] : {std::tuple{6, 2, QkvLayout::separate},
                                                  {1, 1, QkvLayout::separate},
                                                  {8, 1, QkvLayout::separate},
                                                  {3, 3, QkvLayout::interleaved_by_head}})
      for (std::int64_t head_dim : {1, 7, 32, 80, 128, 256}) {
        Setup s{.model = model_of(1, 2, 2, 2), .weight = weight, .seed = std::uint64_t(head_dim)};
        s.values = weight == DType::bf16 ? DType::bf16 : DType::f16;
        INFO(heads << " heads, " << kv_heads << " of k, of " << head_dim << ", weight " << to_string(weight));
        check_against_oracle<ops::QkNorm>(
            s, {{5, heads, kv_heads, head_dim, layout}, {.layout = layout, .kv_heads = kv_heads}});
      }
}

TEST_CASE("linear: every epilogue, weight dtype and odd size", "[ops][linear]") {
  using ops::Epilogue;
  for (Epilogue epilogue :
       {Epilogue::none, Epilogue::gelu_erf, Epilogue::gelu_tanh, Epilogue::residual, Epilogue::swiglu})
    for (DType weight : {DType::f16, DType::bf16, DType::f32, DType::f64})
      for (std::int64_t tokens : {1, 2, 3, 8, 9, 17})
        for (auto [in, out] :
             {std::pair<std::int64_t, std::int64_t>{1, 1}, {7, 3}, {63, 33}, {64, 32}, {65, 31}, {300, 65}}) {
          Setup s{.model = model_of(1, 2, 2, 2), .weight = weight, .seed = std::uint64_t(in)};
          s.values = weight == DType::bf16 ? DType::bf16 : DType::f16;
          INFO("epilogue " << int(epilogue) << ", weight " << to_string(weight) << ", tokens " << tokens << ", in "
                           << in << ", out " << out);
          check_against_oracle<ops::Linear>(
              s, {{tokens, in, out, epilogue == Epilogue::residual, {}, rows_of_output(epilogue)},
                  {.epilogue = epilogue}});
        }
}

TEST_CASE("linear: a token's bits do not depend on the tokens beside it", "[ops][linear]") {
  const std::int64_t in = 301, out = 40;
  const Setup s{.model = model_of(1, 2, 2, 2)};
  Problem<ops::Linear> eight(s, {{8, in, out, false}, {}});
  require_run(eight);
  for (std::int64_t t = 0; t < 8; ++t) {
    Tensor y(DType::f32, {1, out});
    ops::Linear::Args one = eight.args();
    one.x = View<const float, 2>{eight.args().x.as<const float>().data + t * in, {1, in}};
    one.y = y.view<2>();
    REQUIRE(cpu_ref::run(one));
    CHECK(std::memcmp(y.data(), eight.args().y.as<float>().data + t * out, std::size_t(y.size_bytes())) == 0);
  }
}

TEST_CASE("linear: SwiGLU of quantised gate and up, of any number of tokens", "[ops][linear]") {
  for (const GptqSetup& gptq : {GptqSetup{4, 32, 1, true}, GptqSetup{8, 64, 0, false}})
    for (std::int64_t tokens : {1, 3, 9, 65})
      for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{64, 4}, {96, 132}, {32, 260}}) {
        INFO(gptq.bits << " bits, tokens " << tokens << ", in " << in << ", out " << out);
        check_against_oracle<ops::Linear>({.model = model_of(1, 2, 2, 2), .gptq = gptq},
                                          {{tokens, in, out, false, {}, 2}, {.epilogue = ops::Epilogue::swiglu}});
      }
}

OP_TEST_CASE("Norms of any hidden size agree with the oracle", "[ops]", std::tuple<ops::LayerNorm, ops::RmsNorm>) {
  for (std::int64_t hidden : {1, 2, 3, 7, 8, 9, 31, 255, 2560, 5120})
    for (Fill fill : {Fill::normal, Fill::heavy_tailed, Fill::shifted}) {
      INFO("hidden " << hidden << ", fill " << int(fill));
      check_against_oracle<TestType>({.model = model_of(1, 2, 2, 2), .fill = fill}, {{3, hidden}, {}});
    }
}
