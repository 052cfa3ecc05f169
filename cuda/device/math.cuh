#pragma once
// Arithmetic that kernels share. Functions with CF_HD are compiled for the host, too, where their tests run.
#include <cmath>
#include <cstdint>

#include "core/host_device.hpp"

namespace cf::cuda {

/// Mean and sum of squared deviations (m2) of `count` values. The states of a row's parts merge to that of the row:
///   mean = sum of count_i mean_i / n,  m2 = sum of m2_i + count_i (mean_i - mean)^2
/// Source: Welford 1962; Chan, Golub, LeVeque 1979. Unlike E[x^2] - E[x]^2 this does not cancel.
struct Welford {
  float count = 0, mean = 0, m2 = 0;

  CF_HD float sum() const { return count * mean; }
  /// The sum of squared deviations from `centre`.
  CF_HD float m2_about(float centre) const { return m2 + count * (mean - centre) * (mean - centre); }
};

/// x/2 (1 + erf(x / sqrt 2)). erfc keeps its digits where x is far below zero; 1 + erf does not.
CF_HD inline float gelu_erf(float x) { return 0.5f * x * erfcf(-0.70710678118654752f * x); }

/// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
CF_HD inline float gelu_tanh(float x) {
  return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

/// RoPE's rotation of a pair: (a, b) = (a cos - b sin, b cos + a sin). The fmaf calls fix which product is rounded, so
/// every kernel gives the same bits.
CF_HD inline void rotate(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = turned;
}

/// The entry of its sequence's cache that the nth of a sequence's q_len new tokens goes to: kv_len counts the entries
/// after the append. -1 where the cache has no room for such a kv_len.
CF_HD inline int new_entry(int kv_len, int q_len, int nth, std::int64_t capacity) {
  return kv_len < q_len || kv_len > capacity ? -1 : kv_len - q_len + nth;
}

/// 2^x. A device computes it by its exponential unit, to two units in the last place; results below 2^-126 are 0 there.
CF_HD inline float exp2_approximate(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

}  // namespace cf::cuda
