#pragma once
// GEMV on tensor cores: a block's rows of the product of up to 16 tokens with a 16-bit weight matrix that is read once.
#include "cuda/device/compiled_for.hpp"
#include "cuda/device/copy.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/gemv/plan.hpp"

namespace cf::cuda {

struct GemvSmem {
  float partial[2][kGemvWarps][kMmaTokens][kTileRows];  // tiles use the two in turn: one barrier a tile is enough
};

/// A block's rows of y = W x for up to 16 tokens, or up to 8 where TwoTokens is false. T is float16 or bfloat16. NearX
/// says that x lies in shared memory: its loads are short, and need no registers ahead of their use.
///   row_of(r)                      the row of W that is row r of the tiles, r < rows
///   ready()                        called by all threads after the first weights' loads, before the first use of x
///   x(token, column)               16 bytes of a token's activations
///   begin(token, r)                called early for each element of the product
///   finish(token, r, sum, begun)   takes each element once, with what begin() returned; sum(r) is the element's sum
///                                  and sum(r ^ 1) that of the row beside it
template <class T, int Depth, bool TwoTokens, bool NearX, class RowOf, class Ready, class X, class Begin, class Finish>
__device__ void gemv_block(const T* weights, int rows, int in, int tokens, RowOf row_of, Ready ready, X x, Begin begin,
                           Finish finish, GemvSmem& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = (in + kStepColumns - 1) / kStepColumns;
  const int rounds = ((steps + kGemvWarps - 1) / kGemvWarps + Depth - 1) / Depth;  // of Depth steps, for a tile
  const int tiles = (rows + kTileRows - 1) / kTileRows;

  const auto column = [&](int step) { return (step * kGemvWarps + warp) * kStepColumns + t * kVec; };
  const auto load_weight = [&](const T* row, int step) {
    const int c = column(step);
    return row && c < in ? load_streaming(row + c) : uint4{};
  };
  const auto load_x = [&](int token, int step) {
    const int c = column(step);
    return token < tokens && c < in ? x(token, c) : uint4{};
  };
  const auto row_pointer = [&](int tile) -> const T* {
    const int r = tile * kTileRows + g;
    return tile < tiles && r < rows ? weights + row_of(r) * long(in) : nullptr;
  };

  uint4 w[Depth], low[Depth], high[TwoTokens ? Depth : 1] = {};
  const T* row = row_pointer(blockIdx.x);
#pragma unroll
  for (int d = 0; d < Depth; ++d) w[d] = load_weight(row, d);
  ready();
  const auto load_tokens = [&](int d, int step) {
    low[d] = load_x(g, step);
    if constexpr (TwoTokens) high[d] = load_x(g + 8, step);
  };
  if constexpr (!NearX)
#pragma unroll
    for (int d = 0; d < Depth; ++d) load_tokens(d, d);

  int side = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, side ^= 1) {
    const T* next_row = row_pointer(tile + gridDim.x);
    // Thread i finishes element i of the tile. The loads that it needs for that run beside the product.
    decltype(begin(0, 0)) begun{};
    if (const int i = thread_index(), r = tile * kTileRows + i % kTileRows; i < tokens * kTileRows && r < rows)
      begun = begin(i / kTileRows, r);
    float sum[2][4] = {};
    for (int round = 0; round < rounds; ++round) {
      const bool last = round + 1 == rounds;
#pragma unroll
      for (int d = 0; d < Depth; ++d) {
        if constexpr (NearX) load_tokens(d, round * Depth + d);
        const uint4 second = TwoTokens ? high[d] : uint4{};
        // A sum may take its columns in any order: a lane's eight consecutive columns are operands of two products.
        mma(sum[0], low[d].x, second.x, low[d].y, second.y, w[d].x, w[d].y, T{});
        mma(sum[1], low[d].z, second.z, low[d].w, second.w, w[d].z, w[d].w, T{});
        const int next = last ? d : (round + 1) * Depth + d;
        w[d] = load_weight(last ? next_row : row, next);
        if constexpr (!NearX) load_tokens(d, next);
      }
    }
    row = next_row;
    auto& partial = smem.partial[side];
    partial[warp][g][2 * t] = sum[0][0] + sum[1][0];
    partial[warp][g][2 * t + 1] = sum[0][1] + sum[1][1];
    if constexpr (TwoTokens) {
      partial[warp][g + 8][2 * t] = sum[0][2] + sum[1][2];
      partial[warp][g + 8][2 * t + 1] = sum[0][3] + sum[1][3];
    }
    __syncthreads();
    if (const int i = thread_index(), r = tile * kTileRows + i % kTileRows; i < tokens * kTileRows && r < rows) {
      const auto total = [&](int of) {
        float sum_of = 0;
#pragma unroll
        for (int v = 0; v < kGemvWarps; ++v)
          sum_of += partial[v][i / kTileRows][of % kTileRows];  // in the warps' order
        return sum_of;
      };
      finish(i / kTileRows, r, total, begun);
    }
  }
}

}  // namespace cf::cuda
