// The kernels of norms beyond the derived budgets: float32 results within 1e-6 of the oracle, 16-bit results one
// rounding away from that, rows of every length and number, and data on which a one-pass variance fails.
#include <cmath>
#include <cstring>
#include <tuple>

#include "tests/cuda/device_check.hpp"
#include "tests/support/op_test_case.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Norms = std::tuple<ops::LayerNorm, ops::RmsNorm, ops::LayerNormResidual, ops::ResidualLayerNorm>;

Setup setup(DType activation, Fill fill = Fill::normal) {
  Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .fill = fill};
  s.weight = s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
  return s;
}

/// The number of results out of n that miss their bound, and the first of them. A float32 result must lie within 1e-6
/// of the reference, relative to the reference's largest element. A 16-bit result must be some number within that
/// bound, rounded once: the rounded reference or its neighbour, except near zero, where 16 bits resolve more than the
/// bound.
struct Outside {
  std::int64_t count = 0, first = 0;
};

template <class T>
Outside outside(const T* got, const double* reference, std::int64_t n) {
  double largest = 0;
  for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(reference[i]));
  const double bound = 1e-6 * largest;
  const auto rounded = [](double x) { return sizeof(T) == 2 ? widen<double>(narrow<T>(x)) : x; };
  Outside o;
  for (std::int64_t i = 0; i < n; ++i) {
    const double x = widen<double>(got[i]), r = reference[i];
    if (rounded(r - bound) <= x && x <= rounded(r + bound)) continue;
    if (o.count++ == 0) o.first = i;
  }
  return o;
}

/// Compares the op on the GPU with the oracle on the same numbers, output by output, 256 rows at a time. The expected y
/// of residual_layernorm is the norm of the stored h, which y is the norm of.
template <class Op>
void check_rounding(const Setup& s, std::int64_t tokens, std::int64_t hidden, cuda::Context& c) {
  INFO(Op::name << ", " << to_string(s.activation) << ", " << tokens << " tokens of " << hidden);
  const std::int64_t rows = std::min<std::int64_t>(tokens, 256), elements = rows * hidden;
  REQUIRE(tokens % rows == 0);
  DeviceProblem<Op> device(s, {{tokens, hidden}, {}});
  Problem<Op>& got = device.run(c);
  Setup exact = s;
  exact.activation = DType::f64;
  Problem<Op> reference(exact, {{rows, hidden}, {}});
  auto& args = reference.args();
  for (std::int64_t first = 0; first < tokens; first += rows) {
    const auto for_each_block = [&](auto&& f) {
      for (std::size_t i = 0; i < got.blocks().size(); ++i) {
        auto &from = got.blocks()[i], &to = reference.blocks()[i];
        const std::int64_t offset = is_weight(from.role) ? 0 : first * hidden * std::int64_t(size_bytes(from.dtype));
        f(from, static_cast<const std::byte*>(from.data()) + offset, to);
      }
    };
    for_each_block([&](auto& from, const void* here, auto& to) {
      if (from.role != Role::output) convert(here, from.dtype, to.data(), to.dtype, element_count(to.shape));
    });
    REQUIRE(cpu_ref::run(args));
    for_each_block([&](auto& from, const void* here, auto& to) {
      if (from.role != Role::output) return;
      const auto* expected = static_cast<const double*>(to.data());
      Outside o;
      dispatch_float(from.dtype,
                     [&](auto zero) { o = outside(static_cast<const decltype(zero)*>(here), expected, elements); });
      INFO(from.name << ": " << o.count << " elements, the first [" << first * hidden + o.first << "]: got "
                     << load_element(here, from.dtype, o.first) << ", expected " << expected[o.first]);
      CHECK(o.count == 0);
      if constexpr (std::is_same_v<Op, ops::ResidualLayerNorm>)
        if (from.name == "h") {
          convert(here, from.dtype, to.data(), to.dtype, elements);
          REQUIRE(cpu_ref::run(ops::LayerNorm::Args{.x = args.h, .norm = args.norm, .y = args.y, .eps = args.eps}));
        }
    });
  }
}

/// Copies a tensor into the memory behind a view of the same dtype and size.
void upload(const Tensor& t, ConstAnyView<2> to) {
  REQUIRE(t.dtype() == to.dtype);
  require_cuda(cudaMemcpy(const_cast<void*>(to.data), t.data(), std::size_t(t.size_bytes()), cudaMemcpyHostToDevice));
}

}  // namespace

OP_TEST_CASE("Norms on the GPU are one rounding away from the oracle", "[gpu][norms]", Norms) {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t hidden : {8, 264, 2560, 5120, 8192, 8200, 32768})
      for (std::int64_t tokens : {1, 3, 20}) check_rounding<TestType>(setup(activation), tokens, hidden, c);
}

OP_TEST_CASE("Norms on the GPU are one rounding away from the oracle for 4096 tokens", "[gpu][norms]", Norms) {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::f32}) check_rounding<TestType>(setup(activation), 4096, 2560, c);
}

OP_TEST_CASE("Norms on the GPU: any length and number of rows", "[gpu][norms]", Norms) {
  for (DType activation : {DType::f16, DType::f32})
    for (Fill fill : {Fill::heavy_tailed, Fill::shifted})
      for (auto [tokens, hidden] : {std::pair<std::int64_t, std::int64_t>{1, 8},
                                    {2, 248},
                                    {700, 256},
                                    {300, 264},
                                    {8449, 40},  // more than the SMs take at once
                                    {5, 8192},
                                    {20, 8200},
                                    {3, 20480},
                                    {2, 32768}})
        CHECK(check_on_device<TestType>(setup(activation, fill), {{tokens, hidden}, {}}));
}

TEST_CASE("layernorm on the GPU keeps its digits where E[x^2] - E[x]^2 has none", "[gpu][norms][small]") {
  // 3000 and a bit: x^2 has ulps of 0.5 to 1, the variance is 1.
  const std::int64_t tokens = 4, hidden = 2560;
  const Setup s = setup(DType::f32);
  Setup exact = s;
  exact.activation = DType::f64;
  const std::pair<ops::LayerNorm::Dims, ops::LayerNorm::Args> sizes{{tokens, hidden}, {}};
  Problem<ops::LayerNorm> reference(exact, sizes);
  DeviceProblem<ops::LayerNorm> device(s, sizes);
  auto& args = reference.args();
  auto* x = const_cast<double*>(args.x.as<const double>().data);
  Tensor shifted(DType::f32, {tokens, hidden}), naive(DType::f32, {tokens, hidden});
  for (std::int64_t i = 0; i < shifted.size(); ++i) x[i] = shifted.as<float>()[i] = float(3000 + x[i]);
  REQUIRE(cpu_ref::run(args));
  const auto condition = cpu_ref::condition(args);
  REQUIRE(condition);
  const Budget budget =
      ops::LayerNorm::budget(reference.dims(), {.compute = DType::f32, .output = DType::f32}, *condition);

  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* row = shifted.as<float>() + t * hidden;
    float sum = 0, square_sum = 0;
    for (std::int64_t i = 0; i < hidden; ++i) sum += row[i], square_sum += row[i] * row[i];
    const float mean = sum / float(hidden), rstd = 1 / std::sqrt(square_sum / float(hidden) - mean * mean + 1e-5f);
    for (std::int64_t i = 0; i < hidden; ++i)
      naive.as<float>()[t * hidden + i] =
          (row[i] - mean) * rstd * float(load_element(args.norm.gamma.data, s.weight, i)) +
          float(load_element(args.norm.beta.data, s.weight, i));
  }
  const Tensor expected = reference.tensor(reference.blocks().back());
  const auto wrong = compare(naive, expected);
  REQUIRE(wrong);
  CHECK_FALSE(wrong->within(budget));

  upload(shifted, device.args().x);
  cuda::Context c = context();
  Problem<ops::LayerNorm>& got = device.run(c);
  const auto result = compare(got.tensor(got.blocks().back()), expected);
  REQUIRE(result);
  INFO("relative max " << result->rel_max << ", of the naive form " << wrong->rel_max);
  CHECK(result->within(budget));
  CHECK(result->rel_max < 1e-3);
}

TEST_CASE("rmsnorm on the GPU: an eps beside which the mean of squares is small, and rows of zeros", "[gpu][norms]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t hidden : {8, 264, 4096, 8200})
      for (double eps : {1e-6, 0.5, 100.}) {
        const Setup s = setup(activation);
        Problem<ops::RmsNorm> p(s, {{3, hidden}, {.eps = eps}});
        CHECK(check_on_device<ops::RmsNorm>(s, p));
        auto& x = p.blocks().front();
        REQUIRE(x.name == "x");
        std::memset(x.data(), 0, x.bytes());
        CHECK(check_on_device<ops::RmsNorm>(s, p));
      }
}
