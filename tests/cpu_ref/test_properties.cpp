// Properties that hold for all numbers, which no reference is needed for.
#include <omp.h>

#include <cstring>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/simd/kernels.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/grouped.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::test;

namespace {

const Setup kSetup{
    .model = model_of(2, 80, 20, 24), .load = {.batch = 1, .q_len = 1, .kv_len = 33}, .activation = DType::f64};

template <class Op>
double* data_of(Problem<Op>& p, const char* name) {
  for (auto& b : p.blocks())
    if (b.name == name) return static_cast<double*>(b.data());
  return nullptr;
}

template <class Op>
void require_run(Problem<Op>& p) {
  const Status s = cpu_ref::run(p.args());
  INFO(s.message());
  REQUIRE(s);
}

double norm(const double* x, std::int64_t n) {
  double s = 0;
  for (std::int64_t i = 0; i < n; ++i) s += x[i] * x[i];
  return std::sqrt(s);
}

/// One token's q and k, turned to the given position.
std::pair<std::vector<double>, std::vector<double>> turned(std::int32_t position) {
  Setup s = kSetup;
  s.load.capacity = 4096;
  Problem<ops::Rope> p(s);
  for (auto& b : p.blocks())
    if (b.role == Role::position) *static_cast<std::int32_t*>(b.data()) = position;
  require_run(p);
  return {{data_of(p, "q"), data_of(p, "q") + 80}, {data_of(p, "k"), data_of(p, "k") + 80}};
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double s = 0;
  for (std::size_t i = 0; i < a.size(); ++i) s += a[i] * b[i];
  return s;
}

}  // namespace

TEST_CASE("RoPE preserves norms and passes the rest through", "[property][rope]") {
  Problem<ops::Rope> p(kSetup);
  require_run(p);
  const double *qkv = data_of(p, "qkv"), *q = data_of(p, "q"), *k = data_of(p, "k"), *v = data_of(p, "v");
  for (int h = 0; h < 2; ++h) {
    const double* head = qkv + h * 240;
    // cos and sin are float32, so that cos^2 + sin^2 is 1 to about 1e-7.
    CHECK(std::abs(norm(q + h * 80, 20) / norm(head, 20) - 1) < 2e-7);
    CHECK(std::abs(norm(k + h * 80, 20) / norm(head + 80, 20) - 1) < 2e-7);
    CHECK(std::equal(head + 20, head + 80, q + h * 80 + 20));
    CHECK(std::equal(head + 100, head + 160, k + h * 80 + 20));
    CHECK(std::equal(head + 160, head + 240, v + h * 80));
  }
}

TEST_CASE("RoPE at position 0 changes nothing", "[property][rope]") {
  const auto [q, k] = turned(0);
  Problem<ops::Rope> p(kSetup);
  const double* qkv = data_of(p, "qkv");
  // The same seed makes the same qkv, whatever the table's length: it is the first tensor.
  CHECK(std::equal(q.begin(), q.end(), qkv));
  CHECK(std::equal(k.begin(), k.end(), qkv + 80));
}

TEST_CASE("RoPE without a table parts the product into q, k and v", "[property][rope]") {
  for (const auto layout : {ops::QkvLayout::interleaved_by_head, ops::QkvLayout::separate}) {
    const std::int64_t kv_heads = layout == ops::QkvLayout::separate ? 2 : 4;
    Problem<ops::Rope> p(kSetup, {{1, 4, kv_heads, 10, 0, 0, layout}, {.layout = layout}});
    REQUIRE(data_of(p, "cos") == nullptr);
    require_run(p);
    const ops::QkvHeads heads{4, kv_heads, layout};
    for (int part = 0; part < 3; ++part)
      for (std::int64_t h = 0; h < (part == 0 ? 4 : kv_heads); ++h) {
        const double* got = data_of(p, part == 0 ? "q" : part == 1 ? "k" : "v") + h * 10;
        CHECK(std::equal(got, got + 10, data_of(p, "qkv") + heads.index(part, h) * 10));
      }
  }
}

TEST_CASE("qk_norm gives each head of q and k the bits of rmsnorm, and v's heads their own", "[property][qk_norm]") {
  Setup s = kSetup;
  s.weight = DType::f64;
  Problem<ops::QkNorm> p(s, {{1, 4, 2, 10, ops::QkvLayout::separate}, {.kv_heads = 2, .eps = 1e-3}});
  require_run(p);
  for (std::int64_t row = 0; row < 8; ++row) {
    double *x = data_of(p, "qkv") + row * 10, *got = data_of(p, "y") + row * 10, *gamma = data_of(p, "q_gamma");
    if (row >= 4) gamma = data_of(p, "k_gamma");
    std::vector<double> expected(x, x + 10);
    if (row < 6)
      REQUIRE(cpu_ref::run(ops::RmsNorm::Args{.x = View<const double, 2>{x, {1, 10}},
                                              .gamma = View<const double, 1>{gamma, {10}},
                                              .y = View<double, 2>{expected.data(), {1, 10}},
                                              .eps = 1e-3}));
    CHECK(std::equal(expected.begin(), expected.end(), got));
  }
}

TEST_CASE("Attention scores depend on the relative position alone", "[property][rope]") {
  for (std::int32_t distance : {0, 1, 7, 100}) {
    const double near = dot(turned(distance).first, turned(0).second);
    for (std::int32_t offset : {1, 13, 1000, 3900}) {
      const double far = dot(turned(offset + distance).first, turned(offset).second);
      CHECK(std::abs(far - near) < 1e-3);  // float32 angles at 4000 radians are off by up to 2.4e-4
    }
  }
}

TEST_CASE("Attention over identical values returns them", "[property][attention]") {
  for (Fill fill : {Fill::normal, Fill::peaked}) {
    Setup s = kSetup;
    s.fill = fill;
    Problem<ops::Attention> p(s);
    double* v = data_of(p, "v_cache");
    for (int h = 0; h < 2; ++h)
      for (int j = 0; j < 33; ++j)
        for (int d = 0; d < 80; ++d) v[(h * 33 + j) * 80 + d] = h + 0.25 * d;
    require_run(p);
    const double* y = data_of(p, "y");
    for (int h = 0; h < 2; ++h)
      for (int d = 0; d < 80; ++d) CHECK(std::abs(y[h * 80 + d] - (h + 0.25 * d)) < 1e-12);
  }
}

TEMPLATE_TEST_CASE("Softmax survives scores of +-1e4", "[property][attention]", float, double) {
  for (double sign : {1.0, -1.0}) {
    Setup s = kSetup;
    s.activation = dtype_of<TestType>;
    Problem<ops::Attention> p(s);
    p.args().scale = 1;
    // q = e0 and k_j = +-1e4 e0, but for key 5, which is 1 higher: its weight is e / (e + 32).
    for (auto& b : p.blocks()) {
      auto* x = static_cast<TestType*>(b.data());
      const std::size_t n = b.bytes() / sizeof(TestType);
      if (b.name == "q" || b.name == "k_cache") std::fill(x, x + n, TestType(0));
      if (b.name == "q") x[0] = x[80] = 1;
      if (b.name == "k_cache")
        for (int row = 0; row < 66; ++row) x[row * 80] = TestType(sign * 1e4 + (row % 33 == 5 ? 1 : 0));
      if (b.name == "v_cache")
        for (std::size_t i = 0; i < n; ++i) x[i] = i / 80 % 33 == 5 ? TestType(1) : TestType(0);
    }
    require_run(p);
    const double expected = std::exp(1.0) / (std::exp(1.0) + 32);
    for (auto& b : p.blocks())
      if (b.name == "y")
        for (std::size_t i = 0; i < b.bytes() / sizeof(TestType); ++i)
          CHECK(std::abs(double(static_cast<TestType*>(b.data())[i]) - expected) < 1e-6);
  }
}

TEST_CASE("Attention is causal: a later token does not show in an earlier one's result", "[property][attention]") {
  Setup s = kSetup;
  s.load = {.batch = 1, .q_len = 4, .kv_len = 9, .capacity = 9};
  Problem<ops::Attention> p(s), changed(s);
  // Entry 8 is the last token's own: only the last query sees it.
  for (int h = 0; h < 2; ++h)
    for (int d = 0; d < 80; ++d) {
      data_of(changed, "k_cache")[(h * 9 + 8) * 80 + d] += 1;
      data_of(changed, "v_cache")[(h * 9 + 8) * 80 + d] += 1;
    }
  require_run(p);
  require_run(changed);
  const double *a = data_of(p, "y"), *b = data_of(changed, "y");
  CHECK(std::equal(a, a + 3 * 160, b));
  CHECK_FALSE(std::equal(a + 3 * 160, a + 4 * 160, b + 3 * 160));
}

TEMPLATE_TEST_CASE("Grouped-query attention gives the bits of attention over repeated kv heads",
                   "[property][attention][grouped]", float, double) {
  for (auto [heads, kv_heads] : kGroupedHeads)
    for (const Workload& load : {Workload{1, 1, 1, 0}, Workload{3, 1, 33, 40}, Workload{2, 4, 17, 20}}) {
      const Setup s = grouped_setup(heads, kv_heads, 16, load, dtype_of<TestType>);
      Problem<ops::Attention> grouped(s), repeated = with_repeated_heads(s);
      INFO(describe(s));
      require_run(grouped);
      require_run(repeated);
      auto &y = grouped.blocks().back(), &expected = repeated.blocks().back();
      CHECK(std::memcmp(y.data(), expected.data(), y.bytes()) == 0);
    }
}

TEST_CASE("Each query head reads the kv head of its group", "[property][attention][grouped]") {
  // The values of kv head g are all g: softmax weights sum to 1 whatever they are.
  for (auto [heads, kv_heads] : kGroupedHeads) {
    Problem<ops::Attention> p(grouped_setup(heads, kv_heads, 16, {1, 1, 9, 0}, DType::f64));
    double* v = data_of(p, "v_cache");
    for (std::int64_t i = 0; i < kv_heads * 9 * 16; ++i) v[i] = double(i / (9 * 16));
    require_run(p);
    for (std::int64_t h = 0; h < heads; ++h)
      CHECK(std::abs(data_of(p, "y")[h * 16] - double(h / (heads / kv_heads))) < 1e-12);
  }
}

TEST_CASE("Attention's compulsory bytes count each kv head once", "[cost][attention][grouped]") {
  const auto bytes = [](std::int64_t kv_heads) {
    const Setup s = grouped_setup(24, kv_heads, 128, {2, 3, 100, 0}, DType::f16);
    return ops::Attention::cost(example_of<ops::Attention>(s).first, DType::f16, DType::f16).bytes;
  };
  // q and y of 2 * 3 tokens, keys and values of 2 * 100 entries, two lengths.
  CHECK(bytes(24) == 2 * 2 * (2 * 3 * 24 * 128 + 2 * 100 * 24 * 128) + 2 * 4);
  CHECK(bytes(3) == 2 * 2 * (2 * 3 * 24 * 128 + 2 * 100 * 3 * 128) + 2 * 4);
  const Setup s = grouped_setup(24, 3, 128, {2, 3, 100, 0}, DType::f16);
  CHECK(ops::KvAppend::cost(example_of<ops::KvAppend>(s).first, DType::f16, DType::f16).bytes ==
        2 * 4 * (2 * 3 * 3 * 128) + 2 * 4);
}

TEST_CASE("rope_append is rope's q, and rope's k and v behind the caches' old entries", "[property][rope]") {
  Setup s = kSetup;
  s.load = {.batch = 3, .q_len = 2, .kv_len = 9, .capacity = 11};
  Problem<ops::RopeAppend> fused(s), untouched(s);
  Problem<ops::Rope> rope(s);
  std::memcpy(data_of(rope, "qkv"), data_of(fused, "qkv"), std::size_t(fused.args().qkv.bytes()));
  require_run(fused);
  require_run(rope);
  CHECK(std::memcmp(data_of(fused, "q"), data_of(rope, "q"), std::size_t(rope.args().q.bytes())) == 0);
  const std::int64_t heads = 2, row = 80;
  for (const auto& [cache, made] : {std::pair{"k_cache", "k"}, {"v_cache", "v"}})
    for (std::int64_t b = 0; b < 3; ++b)
      for (std::int64_t head = 0; head < heads; ++head)
        for (std::int64_t entry = 0; entry < 11; ++entry) {
          const std::int64_t at = ((b * heads + head) * 11 + entry) * row, nth = entry - (kv_len_of(s.load, b) - 2);
          const double* const expected = nth == 0 || nth == 1
                                             ? data_of(rope, made) + ((b * 2 + nth) * heads + head) * row
                                             : data_of(untouched, cache) + at;
          CAPTURE(cache, b, head, entry);
          CHECK(std::memcmp(data_of(fused, cache) + at, expected, row * sizeof(double)) == 0);
        }
}

TEST_CASE("rope_append's compulsory bytes are rope's and the lengths", "[cost][rope]") {
  Setup s = kSetup;
  s.load = {.batch = 3, .q_len = 2, .kv_len = 9, .capacity = 11};
  const Cost fused = ops::RopeAppend::cost(example_of<ops::RopeAppend>(s).first, DType::f16, DType::f16);
  // qkv, and as many elements of q and of the caches; six tokens' positions and rows of the table; three lengths.
  CHECK(fused.bytes == 2 * 2 * (6 * 3 * 2 * 80) + 6 * (4 + 2 * 4 * 10) + 3 * 4);
  CHECK(fused.flops == ops::Rope::cost(example_of<ops::Rope>(s).first, DType::f16, DType::f16).flops);
}

TEST_CASE("append_rows stores the new row, and copies rows into the cache as its entries", "[property][append_rows]") {
  // Two kv heads of 80, 33 entries of a capacity of 34; rows 30 and 31 become entries.
  Setup s = kSetup;
  s.load.capacity = 34;
  const std::int64_t heads = 2, head_dim = 80, capacity = 34, last = 32;
  for (const auto& [first, is_appended] : {std::pair{30, false}, {32, false}, {30, true}, {32, true}}) {
    CAPTURE(first, is_appended);
    Problem<ops::AppendRows> p(s), before(s);
    p.args().rows.first = first;
    p.args().is_appended = is_appended;
    require_run(p);
    for (const char* name : {"k", "v"}) {
      const std::string of(name);
      const double *token = data_of(p, name), *rows = data_of(p, (of + "_rows").c_str()),
                   *cache = data_of(p, (of + "_cache").c_str()), *old_rows = data_of(before, (of + "_rows").c_str()),
                   *old_cache = data_of(before, (of + "_cache").c_str());
      std::int64_t wrong = 0;
      const auto compare = [&](const double* got, const double* expected) {
        wrong += std::memcmp(got, expected, std::size_t(head_dim) * sizeof(double)) != 0;
      };
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t j = 0; j < capacity; ++j) {
          const std::int64_t row = (j * heads + h) * head_dim, entry = (h * capacity + j) * head_dim;
          compare(rows + row, j == last ? token + h * head_dim : old_rows + row);
          const bool is_written = j >= first && (j < last || (j == last && !is_appended));
          compare(cache + entry, is_written ? rows + row : old_cache + entry);
        }
      CHECK(wrong == 0);
    }
    // A cache of which nothing is written is no tensor of the call.
    const auto d = ops::AppendRows::dims(p.args());
    int tensors = 0;
    ops::AppendRows::tensors(d, p.args(), [&](auto&&...) { ++tensors; });
    CHECK(tensors == (d.writes_cache() ? 7 : 5));
    const double row = 2 * 160 * 8, written = 1 + double(d.copied) + (is_appended ? 0 : 1);
    CHECK(ops::AppendRows::cost(d, DType::f64, DType::f64).bytes == row * (1 + double(d.copied) + written) + 4);
  }
}

TEST_CASE("LayerNorm does not see a shift or a scale of its row", "[property][layernorm]") {
  Setup s = kSetup;
  Problem<ops::LayerNorm> p(s), moved(s);
  p.args().eps = moved.args().eps = 1e-300;  // eps alone depends on the scale
  double* x = data_of(moved, "x");
  for (int i = 0; i < 160; ++i) x[i] = 8 * x[i] + 1000;
  require_run(p);
  require_run(moved);
  for (int i = 0; i < 160; ++i) CHECK(std::abs(data_of(p, "y")[i] - data_of(moved, "y")[i]) < 1e-11);
}

TEST_CASE("LayerNorm of a constant row is beta", "[property][layernorm]") {
  Problem<ops::LayerNorm> p(kSetup);
  std::fill(data_of(p, "x"), data_of(p, "x") + 160, 3.25);
  require_run(p);
  for (int i = 0; i < 160; ++i)
    CHECK(data_of(p, "y")[i] == load_element(p.args().norm.beta.data, p.args().norm.beta.dtype, i));
}

TEST_CASE("A parallel layer without weights in its products is the identity", "[property][layer]") {
  Setup s = kSetup;
  s.load.batch = 2;
  Problem<ops::DecodeLayer> p(s);
  for (auto& b : p.blocks())
    if (b.role == Role::weight && b.name.find("dense") != std::string::npos)
      std::fill(static_cast<std::byte*>(b.data()), static_cast<std::byte*>(b.data()) + b.bytes(), std::byte{0});
  require_run(p);
  CHECK(std::equal(data_of(p, "hidden"), data_of(p, "hidden") + 320, data_of(p, "output")));
}

TEST_CASE("A multi-token step leaves what its tokens leave one by one", "[property][layer]") {
  for (bool parallel : {true, false}) {
    Setup s = kSetup;
    s.model.use_parallel_residual = parallel;
    s.load = {.batch = 1, .q_len = 4, .kv_len = 9, .capacity = 9};
    Problem<ops::DecodeLayer> together(s);
    LayerState state(s.model, {.batch = 1, .q_len = 1, .kv_len = 9, .capacity = 9}, DType::f64);
    std::copy(data_of(together, "k_cache"), data_of(together, "k_cache") + state.k_cache.size(),
              state.k_cache.as<double>());
    std::copy(data_of(together, "v_cache"), data_of(together, "v_cache") + state.v_cache.size(),
              state.v_cache.as<double>());
    require_run(together);
    for (std::int32_t t = 0; t < 4; ++t) {
      const std::int32_t kv_len = 6 + t;
      state.set_kv_len({&kv_len, 1});
      LayerTensors tensors = state.tensors();
      tensors.cos = together.args().t.cos;
      tensors.sin = together.args().t.sin;
      std::copy(data_of(together, "hidden") + t * 160, data_of(together, "hidden") + (t + 1) * 160,
                state.hidden.as<double>());
      REQUIRE(cpu_ref::run(ops::DecodeLayer::Args{.model = s.model, .weights = together.args().weights, .t = tensors}));
      for (int i = 0; i < 160; ++i)
        CHECK(std::abs(state.output.as<double>()[i] - data_of(together, "output")[t * 160 + i]) < 1e-12);
    }
  }
}

TEST_CASE("Every instruction set multiplies quantised columns within the bound, each token by itself", "[kernels]") {
  constexpr std::int64_t columns = 3 * cpu_ref::GptqColumns::kMultiple, tokens = 7, groups = 3;
  const int bits = GENERATE(4, 8);
  const std::int64_t in = GENERATE(8, 136, 1000), words_in = in * bits / 32, per_word = 32 / bits;
  // Groups one after the other, groups that change within a word, and groups in any order.
  const int order = GENERATE(0, 1, 2);
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  // Rows that lie further apart than the block is wide.
  const std::int64_t stride = columns + 8, zero_stride = stride / per_word;
  std::vector<std::int32_t> words(std::size_t(words_in * stride)), zeros(std::size_t(groups * zero_stride));
  std::vector<std::int32_t> g_idx(std::size_t(in), 0), word_groups(std::size_t(words_in), 0);
  std::vector<f16> scales(std::size_t(groups * stride));
  std::vector<float> x(std::size_t(tokens * in));
  for (auto& w : words) w = std::int32_t(random());
  for (auto& z : zeros) z = std::int32_t(random());
  for (auto& s : scales) s = narrow<f16>(0.01f * normal(random));
  for (auto& v : x) v = normal(random);
  for (std::int64_t k = 0; k < in; ++k) {
    const std::int64_t group_size = in / groups + (order == 0 ? per_word - in / groups % per_word : 1);
    g_idx[std::size_t(k)] = order == 2 ? std::int32_t(random() % groups) : std::int32_t(k / group_size);
  }
  for (std::int64_t word = 0; word < words_in; ++word) {
    const std::int32_t* const g = g_idx.data() + word * per_word;
    const bool same = std::all_of(g, g + per_word, [g](std::int32_t i) { return i == *g; });
    word_groups[std::size_t(word)] = same ? *g : cpu_ref::GptqColumns::kMixed;
  }
  const cpu_ref::GptqColumns block{.columns = columns,
                                   .bits = bits,
                                   .zero_offset = 1,
                                   .words = words.data(),
                                   .word_stride = stride,
                                   .zeros = zeros.data(),
                                   .zero_stride = zero_stride,
                                   .scales = scales.data(),
                                   .scale_stride = stride,
                                   .g_idx = g_idx.data(),
                                   .word_groups = word_groups.data()};
  const auto code = [bits](std::int32_t word, std::int64_t i) {
    return double(std::uint32_t(word) >> (i * bits) & ((1u << bits) - 1));
  };

  std::vector<double> expected(std::size_t(tokens * columns)), sizes(expected.size());
  for (std::int64_t n = 0; n < columns; ++n)
    for (std::int64_t k = 0; k < in; ++k) {
      const std::int64_t g = g_idx[std::size_t(k)];
      const double zero = code(zeros[std::size_t(g * zero_stride + n / per_word)], n % per_word) + 1;
      const double w = (code(words[std::size_t(k / per_word * stride + n)], k % per_word) - zero) *
                       widen<double>(scales[std::size_t(g * stride + n)]);
      for (std::int64_t t = 0; t < tokens; ++t) {
        const double term = w * x[std::size_t(t * in + k)];
        expected[std::size_t(t * columns + n)] += term;
        sizes[std::size_t(t * columns + n)] += std::abs(term);
      }
    }
  std::size_t count = 0;
  const cpu_ref::Kernels* const* sets = cpu_ref::all_kernels(&count);
  for (std::size_t i = 0; i < count; ++i) {
    INFO(sets[i]->name);
    std::vector<float> y(expected.size(), NAN), alone(std::size_t(columns), NAN);
    sets[i]->gptq_columns(block, x.data(), in, tokens, y.data());
    // The worst case of a sum in float32.
    for (std::size_t j = 0; j < y.size(); ++j)
      CHECK(std::abs(y[j] - expected[j]) <= unit_roundoff(DType::f32) * double(in + 1) * sizes[j]);
    for (std::int64_t t = 0; t < tokens; ++t) {
      sets[i]->gptq_columns(block, x.data() + t * in, in, 1, alone.data());
      CHECK(std::equal(alone.begin(), alone.end(), y.begin() + t * columns));
    }
  }
}

TEST_CASE("Every instruction set's inner loops agree with the portable ones", "[kernels]") {
  std::size_t count = 0;
  const cpu_ref::Kernels* const* sets = cpu_ref::all_kernels(&count);
  REQUIRE(count >= 1);
  const cpu_ref::Kernels& portable = cpu_ref::kPortableKernels;
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < count; ++i) {
    const cpu_ref::Kernels& k = *sets[i];
    INFO(k.name);
    // Every float16 bit pattern, NaNs by being NaN.
    std::vector<f16> halves(0x10000);
    for (unsigned b = 0; b < 0x10000; ++b) halves[b].bits = std::uint16_t(b);
    std::vector<float> wide(0x10000), expected(0x10000);
    k.widen_f16(halves.data(), wide.data(), 0x10000);
    portable.widen_f16(halves.data(), expected.data(), 0x10000);
    for (unsigned b = 0; b < 0x10000; ++b) {
      if (std::isnan(expected[b]))
        REQUIRE(std::isnan(wide[b]));
      else
        REQUIRE(wide[b] == expected[b]);
    }
    for (std::int64_t n : {0, 1, 3, 4, 15, 16, 17, 63, 64, 65, 127, 1000}) {
      std::vector<float> w(std::size_t(n) + 1), x(3 * std::size_t(n) + 1), y(3), z(3);
      std::vector<f16> w16(w.size());
      std::vector<bf16> wb(w.size());
      for (std::size_t j = 0; j < w.size(); ++j)
        w[j] = normal(random), w16[j] = narrow<f16>(w[j]), wb[j] = narrow<bf16>(w[j]);
      for (float& v : x) v = normal(random);
      const double bound = 4e-6 * std::sqrt(double(n) + 1);
      const auto check = [&] {
        for (int t = 0; t < 3; ++t) CHECK(std::abs(y[std::size_t(t)] - z[std::size_t(t)]) <= bound);
      };
      k.dot_f32(w.data(), x.data(), n, n, 3, y.data());
      portable.dot_f32(w.data(), x.data(), n, n, 3, z.data());
      check();
      k.dot_f16(w16.data(), x.data(), n, n, 3, y.data());
      portable.dot_f16(w16.data(), x.data(), n, n, 3, z.data());
      check();
      k.dot_bf16(wb.data(), x.data(), n, n, 3, y.data());
      portable.dot_bf16(wb.data(), x.data(), n, n, 3, z.data());
      check();
      // The matrix x twice over, so that a product has more rows than tokens.
      if (n > 0) {
        std::vector<float> rows = x, made(6 * 3), plain(6 * 3);
        rows.resize(3 * std::size_t(n));
        rows.insert(rows.end(), x.begin(), x.begin() + 3 * std::ptrdiff_t(n));
        k.product(rows.data(), 6, x.data(), 3, n, made.data());
        for (std::size_t r = 0; r < 6; ++r)
          portable.dot_f32(rows.data() + r * std::size_t(n), x.data(), n, n, 3, plain.data() + r * 3);
        for (std::size_t j = 0; j < made.size(); ++j) CHECK(std::abs(made[j] - plain[j]) <= 4 * bound);
      }
      std::vector<float> a = w, b = w;
      k.axpy(0.5f, x.data(), a.data(), n);
      portable.axpy(0.5f, x.data(), b.data(), n);
      for (std::size_t j = 0; j < a.size(); ++j) CHECK(std::abs(a[j] - b[j]) <= 1e-6f);
    }
  }
}
