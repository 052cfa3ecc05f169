#pragma once
// The product of a few tokens with a weight matrix that is read once: block functions on tensor cores.
#include "core/ops/linear.hpp"
#include "cuda/arch.hpp"
#include "cuda/device/async.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"

namespace cf::cuda {

/// How a product is laid out. A tile is 8 rows of W; a block takes tiles blockIdx.x, blockIdx.x + grid, ...; its warps
/// divide the columns among them in steps of 32, and a warp keeps `depth` steps' weights in flight in registers.
struct LinearPlan {
  int warps;          // a block
  int depth;          // 16-byte loads in flight a lane
  int blocks_per_sm;  // resident at once
  int grid;
};

inline constexpr int kTileRows = 8, kStepColumns = 32, kMmaTokens = 16;

/// Depth 4 or 5 at four blocks of eight warps puts 64 to 80 KB in flight an SM.
constexpr LinearPlan linear_plan(const Arch& arch, long in, long out) {
  LinearPlan p{.warps = 8, .depth = 4, .blocks_per_sm = 4, .grid = 0};
  const long steps = (in + kStepColumns - 1) / kStepColumns, a_warp = (steps + p.warps - 1) / p.warps;
  p.depth = a_warp % 5 == 0 ? 5 : 4;
  if (arch.threads_per_sm < p.blocks_per_sm * p.warps * 32) p.blocks_per_sm = arch.threads_per_sm / (p.warps * 32);
  const long tiles = (out + kTileRows - 1) / kTileRows, slots = long(arch.sm_count) * p.blocks_per_sm;
  p.grid = int(tiles < slots ? tiles : slots);
  return p;
}

/// A block's share of y = W x for up to 16 tokens. T is float16 or bfloat16.
template <class T, int Warps, int Depth>
struct LinearBlock {
  static constexpr int threads = Warps * 32;
  struct Smem {
    float partial[2][Warps][kMmaTokens][kTileRows];  // of each warp; two, so that one barrier a tile is enough
  };

  /// row_of(r) is the row of W behind the tiles' r-th row, r < rows; x(token, column) brings 16 bytes of a token's
  /// activations; finish(token, r, sum) takes each element of the product once. `ready` is called by all threads between
  /// the first weights' loads and the first use of x.
  template <class RowOf, class Ready, class X, class Finish>
  static __device__ void run(const T* weights, long rows, int in, int tokens, RowOf row_of, Ready ready, X x,
                             Finish finish, Smem& smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int steps = (in + kStepColumns - 1) / kStepColumns;
    const int rounds = ((steps + Warps - 1) / Warps + Depth - 1) / Depth;  // of Depth steps, a tile
    const long tiles = (rows + kTileRows - 1) / kTileRows;

    const auto column = [&](int step) { return (step * Warps + warp) * kStepColumns + t * kVec; };
    const auto load = [&](const T* row, int step) {
      const int c = column(step);
      return row && c < in ? load_streaming(row + c) : uint4{};
    };
    const auto row_pointer = [&](long tile) -> const T* {
      const long r = tile * kTileRows + g;
      return tile < tiles && r < rows ? weights + row_of(r) * long(in) : nullptr;
    };

    uint4 w[Depth];
    const T* row = row_pointer(blockIdx.x);
#pragma unroll
    for (int d = 0; d < Depth; ++d) w[d] = load(row, d);
    ready();

    int parity = 0;
    for (long tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
      const T* next_row = row_pointer(tile + gridDim.x);
      float sum[2][4] = {};
      for (int round = 0; round < rounds; ++round) {
        const bool last = round + 1 == rounds;
#pragma unroll
        for (int d = 0; d < Depth; ++d) {
          const int step = round * Depth + d, c = column(step);
          const uint4 low = g < tokens && c < in ? x(g, c) : uint4{};
          const uint4 high = g + 8 < tokens && c < in ? x(g + 8, c) : uint4{};
          // The order of the columns within a product is free: a lane's eight are two fragments' worth.
          mma(sum[0], low.x, high.x, low.y, high.y, w[d].x, w[d].y, T{});
          mma(sum[1], low.z, high.z, low.w, high.w, w[d].z, w[d].w, T{});
          w[d] = last ? load(next_row, d) : load(row, step + Depth);
        }
      }
      row = next_row;
      auto& mine = smem.partial[parity][warp];
      mine[g][2 * t] = sum[0][0] + sum[1][0];
      mine[g][2 * t + 1] = sum[0][1] + sum[1][1];
      mine[g + 8][2 * t] = sum[0][2] + sum[1][2];
      mine[g + 8][2 * t + 1] = sum[0][3] + sum[1][3];
      __syncthreads();
      for (int i = threadIdx.x; i < tokens * kTileRows; i += threads) {
        const int token = i / kTileRows, r = i % kTileRows;
        if (tile * kTileRows + r >= rows) continue;
        float total = 0;
#pragma unroll
        for (int v = 0; v < Warps; ++v) total += smem.partial[parity][v][token][r];  // in the order of the warps
        finish(token, tile * kTileRows + r, total);
      }
    }
  }
};

__device__ inline float apply(ops::Epilogue epilogue, float v) {
  if (epilogue == ops::Epilogue::gelu_erf) return gelu_erf(v);
  if (epilogue == ops::Epilogue::gelu_tanh) return gelu_tanh(v);
  return v;
}

}  // namespace cf::cuda
