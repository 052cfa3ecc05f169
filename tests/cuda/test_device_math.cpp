// The arithmetic that kernels share, on the host: against the same in double, and of parts against the whole.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/device/math.cuh"
#include "cuda/device/softmax.cuh"
#include "tests/support/catch.hpp"

using namespace cf::cuda;

namespace {

std::vector<float> normal_values(std::size_t n, float mean, float deviation) {
  std::mt19937_64 random(n);
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

/// The state of some values, by two passes in float32 as a warp makes it.
Welford welford_of(const float* x, std::size_t n) {
  Welford w;
  w.count = float(n);
  for (std::size_t i = 0; i < n; ++i) w.mean += x[i] / float(n);
  for (std::size_t i = 0; i < n; ++i) w.m2 += (x[i] - w.mean) * (x[i] - w.mean);
  return w;
}

/// A softmax-weighted sum of one value for each score.
struct WeightedSum {
  SoftmaxState state;
  float values = 0;

  double result() const { return double(values) / double(state.sum); }
};

/// The sum of some scores, by one raise() to their maximum.
WeightedSum weighted_sum(std::vector<float> scores, const float* values, float scale) {
  WeightedSum s;
  float top = -INFINITY;
  for (float score : scores) top = std::max(top, score * scale);
  s.state.raise(top);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    s.state.add_weights<1>([&](int) -> float& { return scores[i]; }, scale);
    s.values += scores[i] * values[i];
  }
  return s;
}

double exact_weighted_sum(const std::vector<float>& scores, const std::vector<float>& values, double scale) {
  const double top = double(*std::max_element(scores.begin(), scores.end()));
  double sum = 0, weighted = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scale * (double(scores[i]) - top));
    sum += weight;
    weighted += weight * double(values[i]);
  }
  return weighted / sum;
}

}  // namespace

TEST_CASE("The states of a row's parts merge to the moments of the row", "[device_math]") {
  constexpr std::size_t n = 2560;
  for (float mean : {0.f, 3000.f}) {
    const std::vector<float> x = normal_values(n, mean, 1);
    double exact_mean = 0, exact_m2 = 0;
    for (float v : x) exact_mean += double(v) / double(n);
    for (float v : x) exact_m2 += (double(v) - exact_mean) * (double(v) - exact_mean);
    for (std::size_t part : {1, 7, 256, 2560}) {
      std::vector<Welford> states{{}};  // a part may be empty
      for (std::size_t begin = 0; begin < n; begin += part)
        states.push_back(welford_of(x.data() + begin, std::min(part, n - begin)));
      float sum = 0, m2 = 0;
      for (const Welford& s : states) sum += s.sum();
      const float merged_mean = sum / float(n);
      for (const Welford& s : states) m2 += s.m2_about(merged_mean);
      INFO("mean " << mean << ", parts of " << part);
      CHECK(std::abs(double(merged_mean) - exact_mean) < 1e-6 * (1 + std::abs(exact_mean)));
      CHECK(std::abs(double(m2) / exact_m2 - 1) < 1e-4);
    }
  }
}

TEST_CASE("A softmax that takes its scores tile by tile is the softmax of all of them", "[device_math]") {
  for (float deviation : {1.f, 30.f, 300.f})
    for (std::size_t n : {1, 16, 100, 2048}) {
      const float scale = 0.125f;
      const std::vector<float> scores = normal_values(n, 0, deviation), values = normal_values(n + 1, 2, 1);
      WeightedSum running;
      for (std::size_t begin = 0; begin < n; begin += 16) {
        float tile[16], top = -INFINITY;
        for (std::size_t i = 0; i < 16; ++i) {
          tile[i] = begin + i < n ? scores[begin + i] : -INFINITY;  // no key
          top = std::max(top, tile[i] * scale);
        }
        if (top > running.state.max) running.values *= running.state.raise(top);
        running.state.add_weights<16>([&](int i) -> float& { return tile[i]; }, scale);
        for (std::size_t i = 0; i < 16 && begin + i < n; ++i) running.values += tile[i] * values[begin + i];
        for (std::size_t i = 0; i < 16; ++i)
          if (begin + i >= n) CHECK(tile[i] == 0);
      }
      INFO(n << " scores of deviation " << deviation);
      // A score rounds to half a unit of its own size, which its weight takes over as a relative error.
      const double rounding = 1e-6 * (1 + double(deviation) * double(scale));
      CHECK(std::abs(running.result() - exact_weighted_sum(scores, values, double(scale))) < 8 * rounding);
    }
}

TEST_CASE("Softmax states of parts merge to that of the whole, empty parts included", "[device_math]") {
  const std::size_t n = 300;
  const float scale = 0.25f;
  const std::vector<float> scores = normal_values(n, 0, 10), values = normal_values(n + 1, 2, 1);
  const double exact = exact_weighted_sum(scores, values, double(scale));
  for (std::size_t part : {1, 37, 100, 300}) {
    WeightedSum whole, of_factors;
    std::vector<WeightedSum> parts{{}};
    for (std::size_t begin = 0; begin < n; begin += part)
      parts.push_back(weighted_sum({scores.begin() + long(begin), scores.begin() + long(std::min(begin + part, n))},
                                   values.data() + begin, scale));
    parts.push_back({});
    for (const WeightedSum& p : parts) {
      const SoftmaxState::Factors f = whole.state.merge(p.state);
      whole.values = whole.values * f.mine + p.values * f.other;
      of_factors.state.max = std::max(of_factors.state.max, p.state.max);
    }
    for (const WeightedSum& p : parts) {
      const float factor = p.state.factor(of_factors.state.max);
      of_factors.state.sum += p.state.sum * factor;
      of_factors.values += p.values * factor;
    }
    INFO("parts of " << part);
    CHECK(whole.state.max == of_factors.state.max);
    CHECK(std::abs(whole.result() - exact) < 1e-5);
    CHECK(std::abs(of_factors.result() - exact) < 1e-5);
  }
  // A split without keys is merged from warps without keys, and takes part in a merge itself.
  SoftmaxState empty;
  empty.merge({});
  CHECK((empty.max == -INFINITY && empty.sum == 0));
  CHECK(empty.factor(empty.max) == 0);
  CHECK(empty.factor(3) == 0);
}

namespace {

double exact_gelu_erf(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }

/// A unit in the last place of x in a format of `digits` binary digits whose subnormal numbers have `least`.
double unit_of(double x, int digits, double least) {
  int exponent;
  std::frexp(x, &exponent);
  return std::max(std::ldexp(1.0, exponent - digits), least);
}

}  // namespace

TEST_CASE("GELU by erf keeps its digits for every float32", "[device_math]") {
  double near = 0, normal = 0, f16_units = 0, bf16_units = 0;
  std::int64_t upwards = 0;
  for (std::uint32_t bits = 0; bits < 0x7f800000; bits += 499)
    for (std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(bits | sign);
      const double got = double(gelu_erf(x)), exact = exact_gelu_erf(double(x)), error = std::abs(got - exact);
      upwards += sign ? !(got <= 0) : !(got >= 0);
      if (std::abs(exact) >= 0x1p-24) {
        normal = std::max(normal, error / std::abs(exact));
        if (x > -3.5f) near = std::max(near, error / std::abs(exact));
      }
      f16_units = std::max(f16_units, error / unit_of(exact, 11, 0x1p-24));
      bf16_units = std::max(bf16_units, error / unit_of(exact, 8, 0x1p-133));
    }
  CHECK(near <= 6.5e-7);
  CHECK(normal <= 1.2e-6);
  CHECK(f16_units <= 0.003);
  CHECK(bf16_units <= 0.004);
  CHECK(upwards == 0);
  CHECK(gelu_erf(INFINITY) == INFINITY);
  CHECK(gelu_erf(-INFINITY) == 0);
  CHECK(std::isnan(gelu_erf(NAN)));
}

TEST_CASE("GELU by tanh is that of double", "[device_math]") {
  for (double x = -12; x <= 12; x += 0.37) {
    const double tanh_form = 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    INFO("x " << x);
    CHECK(std::abs(double(gelu_tanh(float(x))) - tanh_form) <= 1e-6 * (1 + std::abs(x)));
  }
}

TEST_CASE("SiLU keeps its digits for every float32", "[device_math]") {
  double near = 0, far = 0, least = 0;
  std::int64_t upwards = 0;
  for (std::uint32_t bits = 0; bits < 0x7f800000; bits += 499)
    for (std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(bits | sign);
      const double got = double(silu(x)), exact = double(x) / (1 + std::exp(-double(x))), error = std::abs(got - exact);
      upwards += sign ? !(got <= 0) : !(got >= 0);
      if (x >= -1 && std::abs(x) >= 0x1p-126f) near = std::max(near, error / std::abs(exact));
      if (x < -1 && x > -87) far = std::max(far, error / std::abs(exact * double(x)));
      if (x <= -87) least = std::max(least, error);
    }
  CHECK(near <= 2.5e-7);
  CHECK(far <= 1.6e-7);
  CHECK(least <= 0x1p-118);
  CHECK(upwards == 0);
  CHECK(silu(INFINITY) == INFINITY);
  CHECK(std::isnan(silu(-INFINITY)));
  CHECK(std::isnan(silu(NAN)));
}

TEST_CASE("RoPE's rotation turns a pair by its angle", "[device_math]") {
  for (double angle : {0.0, 0.3, 1.0, 2.0, -3.0}) {
    float a = 0.75f, b = -1.5f;
    const double cos = double(float(std::cos(angle))), sin = double(float(std::sin(angle)));
    const double expected_a = 0.75 * cos + 1.5 * sin, expected_b = -1.5 * cos + 0.75 * sin;
    rotate(a, b, float(cos), float(sin));
    CHECK(std::abs(double(a) - expected_a) < 3e-7);
    CHECK(std::abs(double(b) - expected_b) < 3e-7);
  }
}
