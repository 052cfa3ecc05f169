#pragma once
// The arithmetic that kernels share, callable on the host too, where it is tested.
#include <cmath>

#ifdef __CUDACC__
#define CF_HD __host__ __device__
#else
#define CF_HD
#endif

namespace cf::cuda {

/// Mean and sum of squared deviations of `count` values. The states of a row's parts merge to the row's: mean = sum of
/// count_i mean_i / n, m2 = sum of m2_i + count_i (mean_i - mean)^2. Chan, Golub, LeVeque 1979, Welford 1962 for any
/// number of parts: no E[x^2] - E[x]^2, which cancels.
struct Welford {
  float count = 0, mean = 0, m2 = 0;

  CF_HD float sum() const { return count * mean; }
  /// The sum of squared deviations from another centre than the mean.
  CF_HD float m2_about(float centre) const { return m2 + count * (mean - centre) * (mean - centre); }
};

/// x/2 (1 + erf(x / sqrt 2)), through erfc, which keeps its digits where x is far below zero.
CF_HD inline float gelu_erf(float x) { return 0.5f * x * erfcf(-0.70710678118654752f * x); }

/// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
CF_HD inline float gelu_tanh(float x) {
  return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

/// A pair of a head's elements, turned by an angle (RoPE's half rotation). Which product is rounded is said here, so
/// that every kernel gives the same bits.
CF_HD inline void rotate(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = turned;
}

/// A softmax-weighted sum in progress: weights exp(s - max), their sum, and (held by the caller) the sum of the values.
/// Milakov, Gimelshein 2018 (arXiv:1805.02867). Merging two rescales both to the larger maximum.
struct SoftmaxState {
  float max = -INFINITY, sum = 0;

  /// The factors for this state's values and the other's, after which this is both.
  struct Factors {
    float mine, other;
  };
  CF_HD Factors merge(const SoftmaxState& o) {
    const float larger = max > o.max ? max : o.max;
    // Two empty states: the difference of infinities is no number.
    const Factors f{max == -INFINITY ? 0.f : expf(max - larger), o.max == -INFINITY ? 0.f : expf(o.max - larger)};
    sum = sum * f.mine + o.sum * f.other;
    max = larger;
    return f;
  }
};

}  // namespace cf::cuda
