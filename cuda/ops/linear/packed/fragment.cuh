#pragma once
// Fragment product: what a warp multiplies with one instruction or a few. The weights are the operand of sixteen rows,
// the activations that of eight columns. g = lane / 4 and t = lane % 4 throughout.
#include "cuda/device/mma.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/linear/packed/decode.cuh"

namespace cf::cuda {

/// Sums of products of codes and activations, those of low codes and those of high ones. Element d of a lane is of row
/// g + d / 2 * 8 and column 2t + d % 2.
struct GptqSums {
  float low[4], high[4];
};

/// Adds the products of 16 rows and 32 columns of a tile. `words` are the lane's 16 bytes of the tile, `half` says
/// which 32 of its 64 columns, `x` holds the activations of the lane's eight columns 8t .. 8t + 7 for product column g.
template <class T>
__device__ void multiply(const uint4& words, int half, const uint4& x, GptqSums& sums) {
  using Decode = GptqDecode<T>;
  std::uint32_t low[2], high[2], low8[2], high8[2];  // of row g and of row g + 8
  Decode::split(half ? words.z : words.x, low, high);
  Decode::split(half ? words.w : words.y, low8, high8);
  mma(sums.low, low[0], low8[0], low[1], low8[1], x.x, x.y, T{});
  mma(sums.high, high[0], high8[0], high[1], high8[1], x.z, x.w, T{});
}

/// Adds up the activations: multiplies them by ones. The activations are here the operand with sixteen rows, which
/// holds twice as many of them as the operand with eight columns.
template <class T>
__device__ void add_up(const uint4& x, float (&sums)[4]) {
  constexpr std::uint32_t ones = GptqDecode<T>::ones;
  mma(sums, x.x, x.y, x.z, x.w, ones, ones, T{});
}

/// The sums of the activations of product columns 2t and 2t + 1, from what add_up() made for column g.
__device__ inline float2 sums_of_x(const float (&ones)[4], int t) {
  const float sum = ones[0] + ones[2];
  return float2{__shfl_sync(~0u, sum, 8 * t), __shfl_sync(~0u, sum, 8 * t + 4)};
}

/// Element d of a group's sums with its scale and zero applied. `words` holds the scale and zero of rows g and g + 8,
/// `x` the sums of the group's activations.
template <class T>
__device__ float scaled(const uint2& words, int d, const GptqSums& of, const float2& x) {
  using Decode = GptqDecode<T>;
  const float2 row = unpack(d < 2 ? words.x : words.y, f16{});  // scale, zero
  return row.x * (Decode::whole(of.low[d], of.high[d]) - Decode::zero(row.y) * (d % 2 ? x.y : x.x));
}

}  // namespace cf::cuda
