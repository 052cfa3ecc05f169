#pragma once
// LayerNorm and RMSNorm of a row whose parts lie in the registers of several warps. Kernels that divide a row among
// warps in the same way give the same bits: __fmul_rn and fmaf fix which products are rounded, so that the compiler has
// no choice.
#include "cuda/device/math.cuh"
#include "cuda/device/warp.cuh"

namespace cf::cuda {

/// Returns the state of a warp's part of a row, in every lane, and replaces the part's elements by their deviations
/// from the part's mean. x[p] are the lane's pieces; each(f) calls f(p) for those pieces that exist.
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

/// a * b, rounded: the compiler does not fuse it with an addition.
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }

/// The mean and the reciprocal standard deviation of a row.
struct RowMoments {
  float mean, rstd;
};

/// The moments of a row from the states of its `warps` warps, at most MaxWarps. `lane` is the calling lane's number in
/// an aligned group of MaxWarps lanes. All lanes of a warp call and get the same bits.
template <int MaxWarps>
__device__ RowMoments merge_warps(const Welford* states, int warps, int lane, float inverse_hidden, float eps) {
  const Welford other = lane < warps ? states[lane] : Welford{};
  const float mean = product(warp_sum<MaxWarps>(other.sum()), inverse_hidden);
  const float variance = product(warp_sum<MaxWarps>(other.m2_about(mean)), inverse_hidden);
  return {mean, rsqrtf(variance + eps)};
}

/// Normalises the elements of a warp's part of a row, given as deviations from the part's mean, and applies gamma and
/// beta.
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

/// The sum of squares of a warp's part of a row, in every lane. x and each are those of centre_warp().
template <class Each, int Pieces, int N>
__device__ float square_warp(Each each, const float (&x)[Pieces][N]) {
  float squares = 0;
  each([&](int p) {
#pragma unroll
    for (int e = 0; e < N; ++e) squares = fmaf(x[p][e], x[p][e], squares);
  });
  return warp_sum<32>(squares);
}

/// LayerNorm as the kernels of norms take it. A norm has
///   WarpState                   what a warp knows of its part of a row
///   has_beta                    whether it adds beta
///   of_warp(each, x)            the state of a warp's part; it may replace the part's elements
///   of_row(...)                 what normalises an element of x, made from the states of the row's warps
struct LayerNormOfRow {
  using WarpState = Welford;
  static constexpr bool has_beta = true;

  template <class Each, int Pieces, int N>
  __device__ static WarpState of_warp(Each each, float (&x)[Pieces][N]) {
    return centre_warp(each, x);
  }
  /// `mine` is the state of the calling warp; the rest are merge_warps()'s arguments.
  template <int MaxWarps>
  __device__ static NormalisedWarp of_row(const WarpState& mine, const WarpState* states, int warps, int lane,
                                          float inverse_hidden, float eps) {
    return {mine.mean, merge_warps<MaxWarps>(states, warps, lane, inverse_hidden, eps)};
  }
};

/// RMSNorm: the sum of squares in one pass, and no beta.
struct RmsNormOfRow {
  using WarpState = float;  // the sum of squares
  static constexpr bool has_beta = false;

  struct Scaled {
    float scale;
    __device__ float operator()(float x, float gamma) const { return product(product(x, scale), gamma); }
  };

  template <class Each, int Pieces, int N>
  __device__ static WarpState of_warp(Each each, const float (&x)[Pieces][N]) {
    return square_warp(each, x);
  }
  template <int MaxWarps>
  __device__ static Scaled of_row(WarpState, const WarpState* states, int warps, int lane, float inverse_hidden,
                                  float eps) {
    const float squares = warp_sum<MaxWarps>(lane < warps ? states[lane] : 0.f);
    return {rsqrtf(product(squares, inverse_hidden) + eps)};
  }
};

}  // namespace cf::cuda
