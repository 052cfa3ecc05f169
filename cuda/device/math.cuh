#pragma once
// The arithmetic that kernels share, callable on the host too, where it is tested.
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

}  // namespace cf::cuda
