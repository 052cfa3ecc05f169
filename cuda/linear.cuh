#pragma once
// The product of a few tokens with a weight matrix that is read once: block functions on tensor cores.
#include "core/ops/linear.hpp"
#include "cuda/arch.hpp"
#include "cuda/device/async.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"

namespace cf::cuda {

/// How a product is laid out. A tile is 8 rows of W; a block takes tiles blockIdx.x, blockIdx.x + grid, ...; its warps
/// divide the columns among them in steps of 32, and a warp keeps `depth` steps' weights and activations in flight in
/// registers.
struct LinearPlan {
  int depth;          // 16-byte loads of W in flight a lane
  int blocks_per_sm;  // resident at once
  int grid;
};

inline constexpr int kTileRows = 8, kStepColumns = 32, kMmaTokens = 16, kLinearWarps = 8;
inline constexpr int kLinearThreads = 32 * kLinearWarps;

/// Blocks an SM that registers leave room for: with more than 8 tokens a lane holds activations of two.
constexpr int linear_blocks_per_sm(bool two_tokens_a_lane) { return two_tokens_a_lane ? 2 : 3; }

/// Depth 4 or 5, whichever divides a warp's steps. Three blocks of eight warps at depth 5 put 60 KB of weights in flight
/// an SM, which reads a long matrix at 4.49 TB/s of 4.57 on an H200; four blocks reach 4.32, two 4.05.
constexpr LinearPlan linear_plan(const Arch& arch, long in, long out, long tokens) {
  const long steps = (in + kStepColumns - 1) / kStepColumns, a_warp = (steps + kLinearWarps - 1) / kLinearWarps;
  int blocks = linear_blocks_per_sm(tokens > 8);
  if (blocks * kLinearThreads > arch.threads_per_sm) blocks = arch.threads_per_sm / kLinearThreads;
  // All blocks take as many tiles, or one fewer: no block is alone with a last one.
  const long tiles = (out + kTileRows - 1) / kTileRows, slots = long(arch.sm_count) * blocks;
  const long a_block = (tiles + slots - 1) / slots;
  return {.depth = a_warp % 5 == 0 ? 5 : 4, .blocks_per_sm = blocks, .grid = int((tiles + a_block - 1) / a_block)};
}

struct LinearSmem {
  float partial[2][kLinearWarps][kMmaTokens][kTileRows];  // of each warp; two, so that one barrier a tile is enough
};

/// A block's share of y = W x for up to 16 tokens, or 8 where TwoTokens is false. T is float16 or bfloat16.
///   row_of(r)                      the row of W behind the tiles' r-th row, r < rows
///   ready()                        called by all threads after the first weights' loads, before the first use of x
///   x(token, column)               16 bytes of a token's activations
///   begin(token, r)                called early for each element of the product
///   finish(token, r, sum, begun)   takes the element, once, with what its begin() returned
template <class T, int Depth, bool TwoTokens, class RowOf, class Ready, class X, class Begin, class Finish>
__device__ void linear_block(const T* weights, int rows, int in, int tokens, RowOf row_of, Ready ready, X x,
                             Begin begin, Finish finish, LinearSmem& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = (in + kStepColumns - 1) / kStepColumns;
  const int rounds = ((steps + kLinearWarps - 1) / kLinearWarps + Depth - 1) / Depth;  // of Depth steps, a tile
  const int tiles = (rows + kTileRows - 1) / kTileRows;

  const auto column = [&](int step) { return (step * kLinearWarps + warp) * kStepColumns + t * kVec; };
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
#pragma unroll
  for (int d = 0; d < Depth; ++d) {
    low[d] = load_x(g, d);
    if constexpr (TwoTokens) high[d] = load_x(g + 8, d);
  }

  int side = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, side ^= 1) {
    const T* next_row = row_pointer(tile + gridDim.x);
    // Element i of the tile is thread i's in the end: what its epilogue needs is on its way while the product runs.
    const int token = threadIdx.x / kTileRows;
    const int r = tile * kTileRows + int(threadIdx.x) % kTileRows;
    const bool mine = token < tokens && r < rows;
    const auto begun = mine ? begin(token, r) : decltype(begin(0, 0)){};
    float sum[2][4] = {};
    for (int round = 0; round < rounds; ++round) {
      const bool last = round + 1 == rounds;
#pragma unroll
      for (int d = 0; d < Depth; ++d) {
        const uint4 second = TwoTokens ? high[d] : uint4{};
        // The order of the columns within a product is free: a lane's eight are two fragments' worth.
        mma(sum[0], low[d].x, second.x, low[d].y, second.y, w[d].x, w[d].y, T{});
        mma(sum[1], low[d].z, second.z, low[d].w, second.w, w[d].z, w[d].w, T{});
        const int next = last ? d : (round + 1) * Depth + d;
        w[d] = load_weight(last ? next_row : row, next);
        low[d] = load_x(g, next);
        if constexpr (TwoTokens) high[d] = load_x(g + 8, next);
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
    if (mine) {
      float total = 0;
#pragma unroll
      for (int v = 0; v < kLinearWarps; ++v)
        total += partial[v][token][threadIdx.x % kTileRows];  // in the warps' order
      finish(token, r, total, begun);
    }
  }
}

__device__ inline float apply(ops::Epilogue epilogue, float v) {
  if (epilogue == ops::Epilogue::gelu_erf) return gelu_erf(v);
  if (epilogue == ops::Epilogue::gelu_tanh) return gelu_tanh(v);
  return v;
}

}  // namespace cf::cuda
