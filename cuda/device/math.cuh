#pragma once
// Arithmetic that kernels share. Functions with CF_HD are compiled for the host, too, where their tests run.
#include <cmath>
#include <cstdint>

#include "core/host_device.hpp"

namespace cf::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

/// Mean and sum of squared deviations (m2) of `count` values. The states of a row's parts merge to that of the row:
///   mean = sum of count_i mean_i / n,  m2 = sum of m2_i + count_i (mean_i - mean)^2
/// Source: Welford 1962; Chan, Golub, LeVeque 1979. Unlike E[x^2] - E[x]^2 this does not cancel.
struct Welford {
  float count = 0, mean = 0, m2 = 0;

  CF_HD float sum() const { return count * mean; }
  /// The sum of squared deviations from `centre`.
  CF_HD float m2_about(float centre) const { return m2 + count * (mean - centre) * (mean - centre); }
};

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

/// 1 / x. A device computes it to one unit in the last place.
CF_HD inline float reciprocal_approximate(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1 / x;
#endif
}

/// The smaller one, or NaN where either is NaN; fminf() drops it.
CF_HD inline float min_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a < b || a != a ? a : b;
#endif
}

/// x/2 (1 + erf(x / sqrt 2)) = max(x, 0) - a Q(a), where a = |x| and Q(a) = erfc(a / sqrt 2) / 2. The difference does
/// not cancel: the digits are kept where x is far below zero. Q(a) = 2^(-c a^2) N(a) / D(a), with c = log2(e) / 2 as
/// float32 has it. All coefficients are positive, so roundings do not grow. 17 instructions of a device, two of them by
/// its slow unit; by erfcf() they are 48 and four.
///   N has degree 3, D has degree 4 and D(0) = 1. The coefficients make the largest |N / (D f) - 1| / w of 3,000 points
/// in [0, 16] small, where f(a) = Q(a) 2^(c a^2) in float64, w = 1 up to a = 5.6 and min(100, e^(3 (a - 5.6))) beyond,
/// where results are below 2^-24: 1.4e-7. They come from least squares of (N - D f) / (w f D') over N and D, where D'
/// is the D before, repeated with weights that grow where the error is large (Lawson's method).
///   The error on the host, as a part of the result: up to 6e-7 where x > -3.5, and 1.1e-6 where the result is 2^-24 or
/// more, since 2^x takes over its argument's rounding. In units in the last place: 0.002 of float16, 0.003 of bfloat16.
/// A device's approximations add up to 4e-7 of the result. The power is made 2^8 times as large and N that much
/// smaller: a device's power has no subnormal numbers, but bfloat16 has them, of which 0.02 units are lost so. Infinity
/// and NaN stay what they are; -infinity gives 0.
CF_HD inline float gelu_erf(float x) {
  constexpr float scale = 1.f / 256;
  const float a = min_or_nan(fabsf(x), 16);  // from there on all results are x or 0
  const float n =
      fmaf(fmaf(fmaf(scale * 0.014986818f, a, scale * 0.110664636f), a, scale * 0.34625861f), a, scale * 0.49999994f);
  const float d = fmaf(fmaf(fmaf(fmaf(0.037577525f, a, 0.27703166f), a, 0.91055655f), a, 1.4903945f), a, 1);
  const float power = exp2_approximate(fmaf(a * a, -0.72134752f, 8));
  return fmaf(-(a * n) * reciprocal_approximate(d), power, fmaxf(x, 0));
}

/// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
CF_HD inline float gelu_tanh(float x) {
  return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

/// x / (1 + e^-x). The error on the host, as a part of the result, is up to 2.5e-7 where x >= -1, and 1.6e-7 |x| below,
/// where 2^x takes over its argument's rounding. A device's approximations add up to 4e-7 of the result. Infinity and
/// NaN stay what they are; -infinity gives NaN. Results below 2^-118 may be 0.
CF_HD inline float silu(float x) { return x * reciprocal_approximate(1 + exp2_approximate(-kLog2E * x)); }

/// RoPE's rotation of a pair: (a, b) = (a cos - b sin, b cos + a sin). The fmaf calls fix which product is rounded, so
/// every kernel gives the same bits.
CF_HD inline void rotate(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = turned;
}

}  // namespace cf::cuda
