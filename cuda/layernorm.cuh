#pragma once
#include "core/weights.hpp"
#include "cuda/check.hpp"
#include "cuda/device/async.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"

namespace cf::cuda {

struct LayerNormPlan {
  int threads;  // a block; a row is one block's
};

/// Eight elements a thread while that fits one block: a row then lies in registers, and its two passes read it once.
constexpr LayerNormPlan layernorm_plan(long hidden) {
  const long threads = (hidden + kVec - 1) / kVec;
  return {.threads = int(threads < 32 ? 32 : threads > 1024 ? 1024 : (threads + 31) / 32 * 32)};
}

/// A block's LayerNorm of one row, the part that kernels share: every thread calls, with the same arguments.
struct LayerNormBlock {
  static constexpr int max_vectors = 4;  // a thread's share of a row: hidden up to 4 * 8 * 1024
  struct Smem {
    Welford warp[32];
  };

  /// Mean and variance over all threads' states, merged as a tree whose shape depends on the block's size alone.
  static __device__ Welford merge(Welford w, Smem& smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    w = merge_warp(w);
    if (lane == 0) smem.warp[warp] = w;
    __syncthreads();
    return merge_warp(lane < warps ? smem.warp[lane] : Welford{});
  }

  /// store(i, y) for each eight elements y = (x - mean) * rstd * gamma + beta of the row, where load(i, x) brings
  /// x[i .. i + 8) once.
  template <class Load, class Store>
  static __device__ void run(int hidden, float eps, const NormParams& norm, Load load, Store store, Smem& smem) {
    float x[max_vectors][kVec];
    Welford w;
#pragma unroll
    for (int v = 0; v < max_vectors; ++v) {
      const int i = (v * int(blockDim.x) + int(threadIdx.x)) * kVec;
      if (i >= hidden) break;
      load(i, x[v]);
      w.merge(Welford::of(x[v]));
    }
    w = merge(w, smem);
    const float rstd = rsqrtf(w.m2 / float(hidden) + eps);
#pragma unroll
    for (int v = 0; v < max_vectors; ++v) {
      const int i = (v * int(blockDim.x) + int(threadIdx.x)) * kVec;
      if (i >= hidden) break;
      float gamma[kVec], beta[kVec], y[kVec];
      load_vec(norm.gamma.data, norm.gamma.dtype, i, gamma);
      load_vec(norm.beta.data, norm.beta.dtype, i, beta);
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[e] = (x[v][e] - w.mean) * rstd * gamma[e] + beta[e];
      store(i, y);
    }
  }

 private:
  static __device__ Welford merge_warp(Welford w) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      w.merge({__shfl_xor_sync(~0u, w.count, offset), __shfl_xor_sync(~0u, w.mean, offset),
               __shfl_xor_sync(~0u, w.m2, offset)});
    // merge(a, b) and merge(b, a) may differ in the last bit: all lanes take the first one's.
    return {__shfl_sync(~0u, w.count, 0), __shfl_sync(~0u, w.mean, 0), __shfl_sync(~0u, w.m2, 0)};
  }
};

/// What every kernel with a LayerNormBlock asks of a row's length.
inline Status check_layernorm_hidden(std::string_view op, std::int64_t hidden) {
  constexpr std::int64_t most = LayerNormBlock::max_vectors * kVec * 1024;
  if (hidden % kVec || hidden > most)
    return Status::error(Code::unimplemented, std::string(op) + ": cuda takes hidden a multiple of 8 up to " +
                                                  std::to_string(most) + ", got " + std::to_string(hidden));
  return {};
}

}  // namespace cf::cuda
