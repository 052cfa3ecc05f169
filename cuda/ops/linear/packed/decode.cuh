#pragma once
// Decode: codes of four bits as 16-bit operands of mma(), by masks that each make two of them.
#include <cstdint>

#include "core/dtype.hpp"

namespace cf::cuda {

/// The decoder for activations of T. split() makes four pairs of operands of a word's eight codes, which lie in the
/// order of pack/format.hpp:
///   low[0], low[1]    columns (0, 1) and (2, 3)
///   high[0], high[1]  columns (4, 5) and (6, 7)
template <class T>
struct GptqDecode;

/// float16: the four bits of a code, taken as a float16, are the subnormal number code * 2^-24. Shifted left by four
/// they are 16 times that number. Tensor cores multiply subnormal numbers exactly. So a sum of products with codes is
/// 2^24 times too small.
template <>
struct GptqDecode<f16> {
  static constexpr float unit = 0x1p24f;             // finished sums are multiplied by it
  static constexpr std::uint32_t ones = 0x00010001;  // an operand of two codes of one: a pair of 1 / unit

  /// The sum of all products from those of low and of high codes.
  __device__ static float whole(float low, float high) { return low + high * (1.f / 16); }
  /// The operand of a code that equals the stored zero.
  __device__ static float zero(float stored) { return stored; }

  __device__ static void split(std::uint32_t word, std::uint32_t (&low)[2], std::uint32_t (&high)[2]) {
    low[0] = word & 0x000f000f;
    high[0] = word & 0x00f000f0;
    low[1] = word >> 8 & 0x000f000f;
    high[1] = word >> 8 & 0x00f000f0;
  }
};

/// bfloat16: its subnormal numbers have too few bits. The number 128 has four free low bits; with a code in them it is
/// 128 + code. So every zero has 128 added to it.
template <>
struct GptqDecode<bf16> {
  static constexpr float unit = 1;
  static constexpr std::uint32_t ones = 0x3f803f80;

  __device__ static float whole(float low, float high) { return low + high; }
  __device__ static float zero(float stored) { return stored + 128; }

  __device__ static void split(std::uint32_t word, std::uint32_t (&low)[2], std::uint32_t (&high)[2]) {
    low[0] = (word & 0x000f000f) | 0x43004300;
    high[0] = (word >> 4 & 0x000f000f) | 0x43004300;
    low[1] = (word >> 8 & 0x000f000f) | 0x43004300;
    high[1] = (word >> 12 & 0x000f000f) | 0x43004300;
  }
};

}  // namespace cf::cuda
