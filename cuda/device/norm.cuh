#pragma once
// The moments of a row whose parts lie in the registers of several warps: every kernel with a LayerNorm gives the same
// bits that lays a row out over warps in the same way. For that, which products are rounded is said where the compiler
// has a choice.
#include "cuda/device/math.cuh"
#include "cuda/device/warp.cuh"

namespace cf::cuda {

/// The state of a warp's part of a row, the same in each lane: each(f) calls f(p) for a lane's pieces x[p] that are
/// part of it. Two passes over the registers, after which x[p] holds the deviations from the warp's mean.
template <class Each, int Pieces, int N>
__device__ Welford centre_warp(Each each, float (&x)[Pieces][N]) {
  int count = 0;
  float sum = 0;
  each([&](int p) {
    count += N;
#pragma unroll
    for (int e = 0; e < N; ++e) sum += x[p][e];
  });
  Welford state;
  state.count = float(__reduce_add_sync(~0u, unsigned(count)));
  state.mean = __fdividef(warp_sum<32>(sum), state.count);
  float m2 = 0;
  each([&](int p) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      x[p][e] -= state.mean;
      m2 += x[p][e] * x[p][e];
    }
  });
  state.m2 = warp_sum<32>(m2);
  return state;
}

/// a * b, not to be made one with a sum.
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }

struct RowMoments {
  float mean, rstd;
};

/// A row's, from the states of its `warps` warps, at most MaxWarps. All lanes of the calling warp call and get the
/// same.
template <int MaxWarps>
__device__ RowMoments merge_warps(const Welford* states, int warps, float inverse_hidden, float eps) {
  const int of = int(threadIdx.x) % MaxWarps;
  const Welford other = of < warps ? states[of] : Welford{};
  const float mean = product(warp_sum<MaxWarps>(other.sum()), inverse_hidden);
  const float variance = product(warp_sum<MaxWarps>(other.m2_about(mean)), inverse_hidden);
  return {mean, rsqrtf(variance + eps)};
}

/// gamma and beta applied to an element, given as its deviation from its warp's mean.
class NormalisedWarp {
 public:
  __device__ NormalisedWarp(float warp_mean, const RowMoments& row)
      : rstd_(row.rstd), offset_(product(warp_mean - row.mean, row.rstd)) {}
  __device__ float operator()(float deviation, float gamma, float beta) const {
    return fmaf(fmaf(deviation, rstd_, offset_), gamma, beta);
  }

 private:
  float rstd_, offset_;
};

}  // namespace cf::cuda
