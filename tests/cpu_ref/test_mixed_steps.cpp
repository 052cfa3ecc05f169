// Steps whose sequences have different numbers of tokens: what a run is given does not depend on the other runs.
#include <cmath>
#include <cstring>
#include <string>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/mixed_steps.hpp"
#include "tests/support/op_test_case.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// The ops that have a part of some tensor for each sequence, and all ops with runs.
using WithSequences = std::tuple<ops::KvAppend, ops::RopeAppend, ops::Attention, ops::LnQkv, ops::RmsQkv>;
using WithRuns = decltype(std::tuple_cat(WithSequences{}, std::tuple<ops::LnQkvHeads>{}));

/// The ops whose rows are computed one by one. A product's sums depend on how many rows it has.
template <class Op>
constexpr bool is_by_row = !requires(typename Op::Args a) {
  a.linear;
};

template <class Args>
void require_run(const Args& args) {
  const Status s = cpu_ref::run(args);
  INFO(s.message());
  REQUIRE(s);
}

/// Whether two problems' blocks are the same: bit by bit, or to rounding.
template <class Op>
void check_same(Problem<Op>& a, Problem<Op>& b, double tolerance) {
  for (std::size_t i = 0; i < a.blocks().size(); ++i) {
    auto &mine = a.blocks()[i], &theirs = b.blocks()[i];
    INFO(mine.name);
    if (mine.memory == theirs.memory) continue;
    REQUIRE(tolerance > 0);
    REQUIRE(mine.dtype == DType::f64);
    const auto *x = static_cast<const double*>(mine.data()), *y = static_cast<const double*>(theirs.data());
    std::int64_t wrong = 0;
    for (std::int64_t e = 0; e < element_count(mine.shape); ++e)
      wrong += std::isnan(x[e]) != std::isnan(y[e]) || std::abs(x[e] - y[e]) > tolerance;
    CHECK(wrong == 0);
  }
}

ModelConfig model_for(std::string_view op) {
  return op == ops::RmsQkv::name ? gated_model_of(ModelType::llama, 4, 2, 16, 48, 40) : model_of(2, 16, 8, 24);
}

template <class Op>
std::int32_t* data_of(Problem<Op>& p, std::string_view name) {
  for (auto& b : p.blocks())
    if (b.name == name) return static_cast<std::int32_t*>(b.data());
  return nullptr;
}

}  // namespace

OP_TEST_CASE("Runs of 1, 5 and 300 rows in one call are each what it is by itself", "[ops][runs]", WithRuns) {
  for (DType activation : {DType::f64, DType::f32}) {
    if (activation == DType::f32 && !is_by_row<TestType>) continue;
    Problem<TestType> together(mixed_setup(model_for(TestType::name), activation)), apart(together);
    require_run(together.args());
    const Status s = each_by_itself(apart.args(), [](const auto& part) { return cpu_ref::run(part); });
    INFO(s.message());
    REQUIRE(s);
    REQUIRE(together.broken_guard().empty());
    check_same(together, apart, is_by_row<TestType> ? 0 : 1e-12);
  }
}

TEST_CASE("A layer takes runs of 1, 5 and 300 rows in one call", "[ops][runs]") {
  for (const ModelConfig& model : {model_for(""), model_for(ops::RmsQkv::name)}) {
    Problem<ops::DecodeLayer> together(mixed_setup(model, DType::f64)), apart(together);
    require_run(together.args());
    for (const RowRun& r : apart.args().t.runs) {
      ops::DecodeLayer::Args part = apart.args();
      const RowGroup group{.sequence = r.sequence, .first_row = r.first_row, .count = r.count};
      ops::DecodeLayer::tensors(apart.dims(), part, [&]<class V>(const TensorSpec& t, V& view, const auto&) {
        if (t.role == Role::length) view = part_of(view, group.sequence, 1);
        if (t.role == Role::input || t.role == Role::output || t.role == Role::position)
          view = part_of(view, group.first_row, group.count);
        if constexpr (std::is_same_v<V, AnyView<4>>)
          if (t.role == Role::state) view = cache_of(view, group.sequence, 1);
      });
      part.t.runs = {};
      require_run(part);
    }
    check_same(together, apart, 1e-12);
  }
}

OP_TEST_CASE("Equal runs in order are a call without runs", "[ops][runs]", WithRuns) {
  Setup s{.model = model_for(TestType::name),
          .load = {.batch = 3, .q_len = 2, .kv_len = 9, .capacity = 11},
          .activation = DType::f64};
  Problem<TestType> without(s);
  s.runs = {{0, 0, 2}, {1, 2, 2}, {2, 4, 2}};
  Problem<TestType> with(s);
  CHECK(without.bytes() == with.bytes());
  require_run(without.args());
  require_run(with.args());
  CHECK(without.bytes() == with.bytes());
}

OP_TEST_CASE("Runs that do not fit a call are refused by name", "[bad][runs]", WithSequences) {
  const Setup s{.model = model_for(TestType::name),
                .load = {.batch = 3, .q_len = 4, .kv_len = 9, .capacity = 11},
                .activation = DType::f64,
                .runs = {{0, 0, 1}, {2, 1, 4}}};
  const std::string name(TestType::name);
  const auto refused = [&](const std::vector<RowRun>& runs, std::initializer_list<std::string_view> parts) {
    Problem<TestType> p(s);
    const std::vector<std::byte> before = p.bytes();
    p.args().runs = runs;
    const std::string fault = refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument, parts);
    return p.bytes() == before ? fault : "wrote something";
  };
  CHECK(refused({{0, 0, 1}, {3, 1, 4}}, {name + ": runs[1]: expected a sequence of 0 to 2, got 3"}) == "");
  CHECK(refused({{2, 0, 1}, {2, 1, 4}}, {name + ": runs[1]: expected one run a sequence, got 2"}) == "");
  CHECK(refused({{0, 0, 1}, {2, 1, 3}}, {name + ": runs: expected 5 rows in all, got 4"}) == "");
  CHECK(refused({{0, 0, 1}, {2, 1, 5}}, {name + ": runs[1]: expected 1 to 4 rows"}) == "");
  CHECK(refused({{0, 0, 0}, {2, 0, 5}}, {name + ": runs[0]: expected 1 to 5 rows"}) == "");
  CHECK(refused({{0, 0, 1}, {2, 2, 4}}, {name + ": runs[1]: expected the first row 1, got 2"}) == "");
  CHECK(refused({}, {name, "expected (3, "}) == "");  // five rows are not as many of each of three
}

TEST_CASE("ln_qkv_heads takes runs of any sequences, and refuses those that do not fit its rows", "[bad][runs]") {
  const Setup s{.model = model_of(4, 16, 8, 24),
                .load = {.batch = 3, .q_len = 4, .kv_len = 9},
                .kv_heads = 2,
                .activation = DType::f64,
                .runs = {{0, 0, 1}, {2, 1, 4}}};
  Problem<ops::LnQkvHeads> usual(s), far(s);
  const std::vector<RowRun> others{{1 << 30, 0, 1}, {0, 1, 4}};
  far.args().runs = others;
  require_run(usual.args());
  require_run(far.args());
  CHECK(usual.bytes() == far.bytes());
  // The run of four rows, by its formula: a call of its own on rows 1 to 4.
  Problem<ops::LnQkvHeads> alone(s);
  ops::LnQkvHeads::Args part = alone.args();
  part.runs = {};
  part.x = {static_cast<const double*>(part.x.data) + 64, {1, 4, 64}, DType::f64};
  part.q = {static_cast<double*>(part.q.data) + 64, {1, 4, 4, 16}, DType::f64};
  part.k = {static_cast<double*>(part.k.data) + 32, {1, 2, 4, 16}, DType::f64};
  part.v = {static_cast<double*>(part.v.data) + 32, {1, 2, 4, 16}, DType::f64};
  require_run(part);
  for (std::int64_t i = 64; i < 5 * 64; ++i)
    CHECK(std::abs(usual.args().q.as<double>().data[i] - alone.args().q.as<double>().data[i]) < 1e-12);
  for (std::int64_t i = 32; i < 5 * 32; ++i)
    CHECK(std::abs(usual.args().v.as<double>().data[i] - alone.args().v.as<double>().data[i]) < 1e-12);

  const auto refused = [&](const std::vector<RowRun>& runs, std::string_view text) {
    Problem<ops::LnQkvHeads> p(s);
    const std::vector<std::byte> before = p.bytes();
    p.args().runs = runs;
    const std::string fault = refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument, {text});
    return p.bytes() == before ? fault : "wrote something";
  };
  CHECK(refused({{-1, 0, 1}, {2, 1, 4}}, "ln_qkv_heads: runs[0]: expected a sequence from 0 on, got -1") == "");
  CHECK(refused({{2, 0, 1}, {2, 1, 4}}, "ln_qkv_heads: runs[1]: expected one run a sequence, got 2") == "");
  CHECK(refused({{0, 0, 1}, {2, 1, 3}}, "ln_qkv_heads: runs: expected 5 rows in all, got 4") == "");
  CHECK(refused({{0, 0, 1}, {2, 1, 5}}, "ln_qkv_heads: runs[1]: expected 1 to 4 rows") == "");
  Problem<ops::LnQkvHeads> batched(s);
  batched.args().x.shape = {5, 1, 64};
  CHECK(refusal_fault(cpu_ref::run(batched.args()), Code::invalid_argument, {"ln_qkv_heads: 'x'", "(1, 5, 64)"}) == "");
}

TEST_CASE("A length is a run's rows at least, and that of a sequence without rows is not read", "[bad][runs]") {
  const Setup s{.model = model_of(2, 16, 8, 24),
                .load = {.batch = 3, .q_len = 4, .kv_len = 9, .capacity = 11},
                .activation = DType::f64,
                .runs = {{0, 0, 1}, {2, 1, 4}}};
  Problem<ops::Attention> p(s);
  data_of(p, "kv_len")[1] = -7;
  require_run(p.args());
  data_of(p, "kv_len")[2] = 3;
  CHECK(refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument,
                      {"attention: 'kv_len'[2] must be 4 to 9, got 3 (0 is idle)"}) == "");
  Problem<ops::KvAppend> append(s);
  data_of(append, "kv_len")[0] = 12;
  CHECK(refusal_fault(cpu_ref::run(append.args()), Code::invalid_argument,
                      {"kv_append: 'kv_len'[0] must be 1 to 11, got 12 (0 is idle)"}) == "");
}

TEST_CASE("An idle sequence keeps its cache and its results are NaN, and the others do not see it", "[ops][runs]") {
  const Setup s{.model = model_of(2, 16, 8, 24),
                .load = {.batch = 3, .q_len = 2, .kv_len = 9, .capacity = 11},
                .activation = DType::f64};
  const std::int64_t idle = 1, cache = 2 * 11 * 16, rows = 2 * 2 * 16;
  Problem<ops::KvAppend> append(s), active(s), untouched(s);
  data_of(append, "kv_len")[idle] = kIdleLength;
  require_run(append.args());
  require_run(active.args());
  for (std::size_t i = 0; i < append.blocks().size(); ++i) {
    auto& b = append.blocks()[i];
    if (b.role != Role::state) continue;
    for (std::int64_t q = 0; q < 3; ++q) {
      auto& expected = (q == idle ? untouched : active).blocks()[i];
      CHECK(std::memcmp(static_cast<double*>(b.data()) + q * cache, static_cast<double*>(expected.data()) + q * cache,
                        std::size_t(cache) * sizeof(double)) == 0);
    }
  }
  Problem<ops::Attention> attention(s), all(s);
  data_of(attention, "kv_len")[idle] = kIdleLength;
  require_run(attention.args());
  require_run(all.args());
  const double *y = attention.args().y.as<double>().data, *expected = all.args().y.as<double>().data;
  for (std::int64_t i = 0; i < 3 * rows; ++i)
    if (i / rows == idle)
      CHECK(std::isnan(y[i]));
    else
      CHECK(y[i] == expected[i]);
  const auto condition = cpu_ref::condition(attention.args());
  REQUIRE(condition);
  CHECK(std::isfinite(condition->l2));
}
