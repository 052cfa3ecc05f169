#pragma once
// A row of W by a warp, with plain multiply-adds in float32: for activations and sizes that tensor cores do not take.
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/ops/linear/output.cuh"

namespace cf::cuda {

/// The calling warp's element of y, or the element that its two rows make, of up to 16 tokens.
///   load_w(row, column, w)     eight elements of a row
///   load_x(token, column, x)   eight elements of a token
template <bool Gated, class LoadW, class LoadX>
__device__ void multiply_row(long all_rows, long in, int tokens, const LinearOutput& output, LoadW load_w,
                             LoadX load_x) {
  constexpr int rows = Gated ? 2 : 1;
  const long row = (long(blockIdx.x) * kGemvWarps + threadIdx.x / 32) * rows;
  const int lane = threadIdx.x % 32;
  if (row >= all_rows) return;
  float sum[rows][kMmaTokens] = {};
  for (long c = lane * kVec; c < in; c += 32 * kVec) {
    float w[rows][kVec];
#pragma unroll
    for (int r = 0; r < rows; ++r) load_w(row + r, c, w[r]);
#pragma unroll
    for (int token = 0; token < kMmaTokens; ++token) {
      if (token >= tokens) break;
      float v[kVec];
      load_x(token, c, v);
#pragma unroll
      for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[r][token] += w[r][e] * v[e];
    }
  }
#pragma unroll
  for (int token = 0; token < kMmaTokens; ++token) {
    if (token >= tokens) break;
    const float first = warp_sum(sum[0][token]), second = Gated ? warp_sum(sum[rows - 1][token]) : 0;
    if (lane > 0) continue;
    if constexpr (Gated)
      finish_gate(output, token, row, first, second, gate_addends(output, row));
    else
      finish(output, token, row, first, addends(output, token, row));
  }
}

}  // namespace cf::cuda
