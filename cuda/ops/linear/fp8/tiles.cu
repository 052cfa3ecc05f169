// Many tokens: a block makes a tile of tokens and rows by mma, from codes and activations that cp.async brings.
#include "cuda/device/copy.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/ops/linear/fp8/fp8.hpp"
#include "cuda/ops/linear/fp8/matrix.cuh"
#include "cuda/ops/linear/output.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A call as the kernel takes it. `x` and the output begin at the call's first token.
struct TilesCall {
  Fp8Matrix weight;
  const void* x;
  int tokens;
  LinearOutput output;
};

constexpr int kThreads = 256, kUnit = 16;              // bytes of a copy
constexpr int kCodeUnits = kFp8StageColumns / kUnit;   // of a row's codes in a stage
constexpr int kXUnits = kFp8StageColumns * 2 / kUnit;  // of a token's activations in a stage
constexpr int kWarpTokens = 64, kWarpRows = 32;        // of a warp's part of the tile: two by four warps
constexpr int kTokenTiles = kWarpTokens / 16, kRowTiles = kWarpRows / 8;
static_assert(kThreads / 32 == kFp8TileTokens / kWarpTokens * (kFp8TileOfRows / kWarpRows));

/// Where a unit of a token's activations lies in its row of a stage: the eight lanes that load at once read units of two
/// tokens, which lie in different banks so.
__device__ int x_place(int token, int unit) { return unit ^ (token % kXUnits); }

template <class T, bool Gated>
__global__ void __launch_bounds__(kThreads) fp8_tiles_kernel(const __grid_constant__ TilesCall c) {
  extern __shared__ __align__(128) uint4 fp8_stages[];
  let_successor_start();
  const Fp8Matrix& w = c.weight;
  const int first_token = blockIdx.x * kFp8TileTokens, first_row = blockIdx.y * kFp8TileOfRows;
  const int stages = (w.in + kFp8StageColumns - 1) / kFp8StageColumns;
  const auto slot_of = [&](int stage) { return fp8_stages + stage % kFp8Stages * (kFp8StageBytes / kUnit); };
  const auto x_of = [&](uint4* slot) { return slot + kFp8TileOfRows * kCodeUnits; };
  // Rows, tokens and columns beyond the ends of the matrix and of x are filled with zeros.
  const auto copy = [](uint4* to, const void* from, bool there) {
    if (there)
      copy_async(to, from);
    else
      *to = uint4{};
  };
  const auto copy_codes = [&](int stage) {
#pragma unroll
    for (int i = threadIdx.x; i < kFp8TileOfRows * kCodeUnits; i += kThreads) {
      const int row = first_row + i / kCodeUnits, column = stage * kFp8StageColumns + i % kCodeUnits * kUnit;
      copy(slot_of(stage) + i, w.codes + long(row) * w.in + column, row < w.rows && column < w.in);
    }
  };
  const auto copy_x = [&](int stage) {
#pragma unroll
    for (int i = threadIdx.x; i < kFp8TileTokens * kXUnits; i += kThreads) {
      const int of_tile = i / kXUnits, unit = i % kXUnits, token = first_token + of_tile;
      const int column = stage * kFp8StageColumns + unit * (kUnit / 2);
      copy(x_of(slot_of(stage)) + of_tile * kXUnits + x_place(of_tile, unit),
           static_cast<const T*>(c.x) + long(token) * w.in + column, token < c.tokens && column < w.in);
    }
  };
#pragma unroll
  for (int s = 0; s < kFp8Stages - 1; ++s)
    if (s < stages) copy_codes(s);
  wait_for_predecessors();
#pragma unroll
  for (int s = 0; s < kFp8Stages - 1; ++s) {
    if (s < stages) copy_x(s);
    end_copy_group();
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int token0 = warp % 2 * kWarpTokens, row0 = warp / 2 * kWarpRows;  // of the warp, within the tile
  const auto row_of = [&](int n, int e) { return first_row + row0 + 8 * n + 2 * t + e; };
  float sum[kTokenTiles][kRowTiles][4] = {}, part[kTokenTiles][kRowTiles][4] = {};
  float scales[kRowTiles][2] = {};
  constexpr int stages_of_chunk = kFp8Columns / kFp8StageColumns;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    // The oldest of the groups that are under way has arrived, for all threads, and all are done with the slot that the
    // next copies fill.
    wait_copy_groups<kFp8Stages - 2>();
    __syncthreads();
    if (const int next = stage + kFp8Stages - 1; next < stages) {
      copy_codes(next);
      copy_x(next);
    }
    end_copy_group();
    if (stage % stages_of_chunk == 0) {
      const int group = w.groups == 1 ? 0 : stage / stages_of_chunk;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          scales[n][e] = row_of(n, e) < w.rows ? w.scales[long(row_of(n, e)) * w.groups + group] : 0;
    }

    uint4* const slot = slot_of(stage);
    Fp8Pairs codes[kRowTiles][4];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const uint4 raw = slot[(row0 + 8 * n + g) * kCodeUnits + t];
      const std::uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[n][j] = fp8_pairs(words[j], T{});
    }
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
      uint4 x[2][2];  // 16 columns of tokens g and g + 8
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = token0 + 16 * m + g + 8 * side;
          x[side][half] = x_of(slot)[token * kXUnits + x_place(token, 2 * t + half)];
        }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // A sum may take its columns in any order: a lane's 16 columns are operands of four products.
        const uint4 &a = x[0][j / 2], &b = x[1][j / 2];
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
          mma(part[m][n], j % 2 ? a.z : a.x, j % 2 ? b.z : b.x, j % 2 ? a.w : a.y, j % 2 ? b.w : b.y, codes[n][j].first,
              codes[n][j].second, T{});
      }
    }
    if (stage % stages_of_chunk + 1 < stages_of_chunk && stage + 1 < stages) continue;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[m][n][e] += part[m][n][e] * scales[n][e % 2];
          part[m][n][e] = 0;
        }
  }

#pragma unroll
  for (int m = 0; m < kTokenTiles; ++m)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int token = first_token + token0 + 16 * m + g + 8 * side;
      if (token >= c.tokens) continue;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const int row = row_of(n, 0);
        const float(&sums)[4] = sum[m][n];
        if constexpr (Gated) {
          if (row < w.rows)
            finish_gate(c.output, token, row, sums[2 * side], sums[2 * side + 1], gate_addends(c.output, row));
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (row + e < w.rows)
              finish(c.output, token, row + e, sums[2 * side + e], addends(c.output, token, row + e));
        }
      }
    }
}

}  // namespace

Status launch_tiles_fp8(const ops::Linear::Args& a, const Fp8TilesPlan& plan, LaunchList& launches) {
  const TilesCall c{.weight = fp8_matrix(fp8_of(std::get<PackedWeight>(a.linear.weight))),
                    .x = a.x.data,
                    .tokens = int(a.x.shape[0]),
                    .output = linear_output(a)};
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::Linear::name, launches,
                  {.grid = dim3(unsigned(plan.token_tiles), unsigned(plan.row_tiles)),
                   .block = kThreads,
                   .smem_bytes = kFp8Stages * kFp8StageBytes},
                  a.epilogue == ops::Epilogue::swiglu ? fp8_tiles_kernel<T, true> : fp8_tiles_kernel<T, false>, c);
  };
  return a.x.dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
