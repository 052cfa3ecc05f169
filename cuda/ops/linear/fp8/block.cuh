#pragma once
// GEMV on tensor cores: a block's rows of the product of up to 16 tokens with an fp8 matrix that is read once.
#include "cuda/device/copy.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/fp8/matrix.cuh"
#include "cuda/ops/linear/fp8/plan.hpp"

namespace cf::cuda {

struct Fp8Smem {
  // Tiles use the two in turn: one barrier a tile is enough. Four floats more keep a warp's stores in 32 banks.
  float partial[2][kGemvWarps][kMmaTokens][kFp8TileRows + 4];
};

/// A block's rows of y = W x for up to 16 tokens, or up to 8 where TwoTokens is false. T is float16 or bfloat16. The
/// codes are the rows of mma's 16 x 16 operand, the tokens the columns of the other one. A chunk's sums are float32, and
/// are added to those of the row times the scale.
///   ready()                        called by all threads after the first weights' loads, before the first use of x
///   x(token, column)               16 bytes of a token's activations
///   begin(token, row)              called early for each element of the product
///   finish(token, row, sum, begun) takes each element once, with what begin() returned; sum(row) is the element's sum
///                                  and sum(row ^ 1) that of the row beside it
template <class T, bool TwoTokens, class Ready, class X, class Begin, class Finish>
__device__ void fp8_block(const Fp8Matrix& w, int tokens, Ready ready, X x, Begin begin, Finish finish, Fp8Smem& smem) {
  constexpr int depth = fp8_depth(TwoTokens), halves = 2,
                token_tiles = TwoTokens ? 2 : 1;  // a chunk's halves have 16 columns a lane
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int chunks = (w.in + kFp8Columns - 1) / kFp8Columns;
  const int rounds = ((chunks + kGemvWarps - 1) / kGemvWarps + depth - 1) / depth;  // of a tile
  const int tiles = (w.rows + kFp8TileRows - 1) / kFp8TileRows;
  uint4 codes[depth][halves][2];  // of rows g and g + 8
  float scales[depth][2];
  uint4 activations[halves][token_tiles][2];  // of tokens g and g + 8, 16 columns each

  // A warp's chunks of a tile are counted from 0 on.
  const auto chunk_of = [&](int n) { return n * kGemvWarps + warp; };
  const auto column_of = [&](int n, int half) { return chunk_of(n) * kFp8Columns + half * (kFp8Columns / 2) + t * 16; };
  const auto offset_of_tiles = [&](unsigned n) { return n * unsigned(kFp8TileRows * w.in); };
  const auto load_codes = [&](uint4(&to)[2], unsigned row, int tile, int n, int half) {
    const int column = column_of(n, half);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const bool there = tile * kFp8TileRows + g + 8 * side < w.rows && column < w.in;
      to[side] = there ? load_streaming(w.codes + (row + unsigned(8 * side * w.in + column))) : uint4{};
    }
  };
  const auto load_scales = [&](float(&to)[2], int tile, int n) {
    const int chunk = chunk_of(n), group = w.groups == 1 ? 0 : chunk;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = tile * kFp8TileRows + g + 8 * side;
      to[side] = row < w.rows && chunk < chunks ? w.scales[unsigned(row * w.groups + group)] : 0;
    }
  };
  const auto load_x = [&](int n_of_warp, int half) {
    const int column = column_of(n_of_warp, half);
#pragma unroll
    for (int n = 0; n < token_tiles; ++n) {
      const int token = g + 8 * n;
      const bool there = token < tokens && column < w.in;
      activations[half][n][0] = there ? x(token, column) : uint4{};
      activations[half][n][1] = there ? x(token, column + 8) : uint4{};
    }
  };

  unsigned row_at = offset_of_tiles(blockIdx.x) + unsigned(g * w.in);
#pragma unroll
  for (int d = 0; d < depth; ++d) {
#pragma unroll
    for (int half = 0; half < halves; ++half) load_codes(codes[d][half], row_at, blockIdx.x, d, half);
    load_scales(scales[d], blockIdx.x, d);
  }
  ready();
  if constexpr (!TwoTokens)
#pragma unroll
    for (int half = 0; half < halves; ++half) load_x(0, half);

  int side = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, side ^= 1) {
    // Thread i finishes element i of the tile. The loads that it needs for that run beside the product.
    decltype(begin(0, 0)) begun{};
    if (const int i = thread_index(), row = tile * kFp8TileRows + i % kFp8TileRows;
        i < tokens * kFp8TileRows && row < w.rows)
      begun = begin(i / kFp8TileRows, row);
    float sum[token_tiles][4] = {};
    for (int round = 0; round < rounds; ++round) {
      const bool last = round + 1 == rounds;
#pragma unroll
      for (int d = 0; d < depth; ++d) {
        float part[token_tiles][4] = {};
        // The chunk whose codes take the place of this one's, and the chunk whose x comes next: the next tile's are the
        // same.
        const int next = last ? d : (round + 1) * depth + d, next_tile = last ? tile + int(gridDim.x) : tile;
        const int next_x = last && d + 1 == depth ? 0 : round * depth + d + 1;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          if constexpr (TwoTokens) load_x(round * depth + d, half);
          const uint4 &first = codes[d][half][0], &second = codes[d][half][1];
          const std::uint32_t rows[2][4] = {{first.x, first.y, first.z, first.w},
                                            {second.x, second.y, second.z, second.w}};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            // A sum may take its columns in any order: a lane's 16 columns are operands of four products.
            const Fp8Pairs a = fp8_pairs(rows[0][j], T{}), b = fp8_pairs(rows[1][j], T{});
#pragma unroll
            for (int n = 0; n < token_tiles; ++n) {
              const uint4& v = activations[half][n][j / 2];
              mma(part[n], a.first, b.first, a.second, b.second, j % 2 ? v.z : v.x, j % 2 ? v.w : v.y, T{});
            }
          }
          load_codes(codes[d][half], last ? row_at + offset_of_tiles(gridDim.x) : row_at, next_tile, next, half);
          if constexpr (!TwoTokens) load_x(next_x, half);
        }
#pragma unroll
        for (int n = 0; n < token_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[n][e] += part[n][e] * scales[d][e / 2];
        load_scales(scales[d], next_tile, next);
      }
    }
    row_at += offset_of_tiles(gridDim.x);
    auto& partial = smem.partial[side];
    const int thread = thread_index();  // read anew: the loop has no register for an address
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        partial[thread / 32][8 * n + 2 * (thread % 4) + e % 2][thread % 32 / 4 + 8 * (e / 2)] = sum[n][e];
    __syncthreads();
    if (const int i = thread_index(), row = tile * kFp8TileRows + i % kFp8TileRows;
        i < tokens * kFp8TileRows && row < w.rows) {
      const auto total = [&](int of) {
        float sum_of = 0;
#pragma unroll
        for (int v = 0; v < kGemvWarps; ++v)
          sum_of += partial[v][i / kFp8TileRows][of % kFp8TileRows];  // in the warps' order
        return sum_of;
      };
      finish(i / kFp8TileRows, row, total, begun);
    }
  }
}

}  // namespace cf::cuda
