#pragma once
// The arithmetic that kernels share, callable on the host too, where it is tested.
#include <cmath>

#ifdef __CUDACC__
#define CF_HD __host__ __device__
#else
#define CF_HD
#endif

namespace cf::cuda {

/// Mean and sum of squared deviations of `count` values, as one state that two of can be merged.
/// Chan, Golub, LeVeque 1979, the pairwise form of Welford 1962: no E[x^2] - E[x]^2, which cancels.
struct Welford {
  float count = 0, mean = 0, m2 = 0;

  CF_HD void merge(const Welford& o) {
    const float total = count + o.count;
    if (total == 0) return;
    const float delta = o.mean - mean, share = o.count / total;
    mean += delta * share;
    m2 += o.m2 + delta * delta * count * share;
    count = total;
  }

  /// The state of N values at hand, in two passes over them.
  template <int N>
  static CF_HD Welford of(const float (&x)[N]) {
    float sum = 0;
    for (int i = 0; i < N; ++i) sum += x[i];
    Welford w{float(N), sum / N, 0};
    for (int i = 0; i < N; ++i) w.m2 += (x[i] - w.mean) * (x[i] - w.mean);
    return w;
  }
};

/// x/2 (1 + erf(x / sqrt 2)), through erfc, which keeps its digits where x is far below zero.
CF_HD inline float gelu_erf(float x) { return 0.5f * x * erfcf(-0.70710678118654752f * x); }

/// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
CF_HD inline float gelu_tanh(float x) {
  return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

/// A pair of a head's elements, turned by an angle (RoPE's half rotation).
CF_HD inline void rotate(float& a, float& b, float cos, float sin) {
  const float turned = a * cos - b * sin;
  b = b * cos + a * sin;
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
