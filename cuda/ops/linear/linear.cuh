#pragma once
// A block's share of the product of a few tokens with a 16-bit weight matrix that is read once, on tensor cores, and
// what linear's kernels do with the sums.
#include <type_traits>

#include "core/ops/linear.hpp"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/linear.hpp"

namespace cf::cuda {

#ifdef __CUDA_ARCH__
inline constexpr int kCompiledFor = __CUDA_ARCH__ / 10;  // compute capability
#else
inline constexpr int kCompiledFor = 90;
#endif

struct LinearSmem {
  float partial[2][kLinearWarps][kMmaTokens][kTileRows];  // tiles use the two in turn: one barrier a tile is enough
};

/// A block's share of y = W x for up to 16 tokens, or up to 8 where TwoTokens is false. T is float16 or bfloat16. NearX
/// says that x lies in shared memory: its loads are short, and need no registers ahead of their use.
///   row_of(r)                      the row of W that is row r of the tiles, r < rows
///   ready()                        called by all threads after the first weights' loads, before the first use of x
///   x(token, column)               16 bytes of a token's activations
///   begin(token, r)                called early for each element of the product
///   finish(token, r, sum, begun)   takes each element once, with what begin() returned; sum(r) is the element's sum
///                                  and sum(r ^ 1) that of the row beside it
template <class T, int Depth, bool TwoTokens, bool NearX, class RowOf, class Ready, class X, class Begin, class Finish>
__device__ void linear_block(const T* weights, int rows, int in, int tokens, RowOf row_of, Ready ready, X x,
                             Begin begin, Finish finish, LinearSmem& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = (in + kStepColumns - 1) / kStepColumns;
  const int rounds = ((steps + kLinearWarps - 1) / kLinearWarps + Depth - 1) / Depth;  // of Depth steps, for a tile
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
        for (int v = 0; v < kLinearWarps; ++v)
          sum_of += partial[v][i / kTileRows][of % kTileRows];  // in the warps' order
        return sum_of;
      };
      finish(i / kTileRows, r, total, begun);
    }
  }
}

/// Applies an epilogue's activation function to v: none but GELU's two is of one sum. finish() adds the residual.
template <int N>
__device__ void apply(ops::Epilogue epilogue, float (&v)[N]) {
  if (epilogue == ops::Epilogue::gelu_erf)
#pragma unroll
    for (float& x : v) x = gelu_erf(x);
  if (epilogue == ops::Epilogue::gelu_tanh)
#pragma unroll
    for (float& x : v) x = gelu_tanh(x);
}

/// Elements of y from pairs of neighbouring rows' sums, the gate's and the up row's: silu(gate) * up.
template <int N>
__device__ void apply_gates(const float (&sums)[N], float (&y)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) y[i] = silu(sums[2 * i]) * sums[2 * i + 1];
}

/// What linear does with the sums of a launch. The pointers are those of the launch's first token. A kernel that is
/// compiled as Gated makes an element of y of two rows' sums, and adds no residual.
struct LinearOutput {
  const void* bias;
  const void* residual;
  void* y;
  long out;  // of y: with gates half as many as the weight has rows
  DType activation, bias_dtype;
  ops::Epilogue epilogue;
};

inline LinearOutput linear_output(const ops::Linear::Args& a) {
  return {.bias = a.linear.bias.data,
          .residual = a.residual.data,
          .y = a.y.data,
          .out = a.y.shape[1],
          .activation = a.y.dtype,
          .bias_dtype = a.linear.bias.dtype,
          .epilogue = a.epilogue};
}

/// The bits of what is added to an element's sum. Nothing waits for their loads until finish() converts them.
struct Addends {
  std::uint32_t bias, residual;
};

__device__ inline std::uint32_t bias_bits(const LinearOutput& to, long row) {
  return to.bias ? load_bits(to.bias, to.bias_dtype, row) : 0;
}
__device__ inline std::uint32_t residual_bits(const LinearOutput& to, int token, long row) {
  return to.residual ? load_bits(to.residual, to.activation, token * to.out + row) : 0;
}
__device__ inline Addends addends(const LinearOutput& to, int token, long row) {
  return {bias_bits(to, row), residual_bits(to, token, row)};
}

/// The same of a gate's row and the up row behind it.
struct GateAddends {
  std::uint32_t gate, up;
};
template <bool Gated>
using AddendsOf = std::conditional_t<Gated, GateAddends, Addends>;

/// `row` is either of the two.
__device__ inline GateAddends gate_addends(const LinearOutput& to, long row) {
  const long gate = row & ~1L;
  return {bias_bits(to, gate), bias_bits(to, gate + 1)};
}

/// Stores an element of y.
__device__ inline void finish(const LinearOutput& to, int token, long row, float sum, Addends add) {
  float v[] = {sum};
  if (to.bias) v[0] += from_bits(add.bias, to.bias_dtype);
  if (to.residual) v[0] += from_bits(add.residual, to.activation);
  apply(to.epilogue, v);
  store_scalar(to.y, to.activation, token * to.out + row, v[0]);
}

/// Stores the element of y that two rows make; `row` is the gate's.
__device__ inline void finish_gate(const LinearOutput& to, int token, long row, float gate, float up, GateAddends add) {
  float v[] = {gate, up}, y[1];
  if (to.bias) {
    v[0] += from_bits(add.gate, to.bias_dtype);
    v[1] += from_bits(add.up, to.bias_dtype);
  }
  apply_gates(v, y);
  store_scalar(to.y, to.activation, token * to.out + row / 2, y[0]);
}

}  // namespace cf::cuda
