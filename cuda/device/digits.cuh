#pragma once
// Activations as integers of sixteen bits, which are two signed digits of eight bits each: v = 256 high + low. Tensor
// cores multiply digits by codes of four bits, and their integer sums are exact.
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/vec.cuh"

namespace cf::cuda {

/// The largest |v| of an activation. It leaves room for the carry of the low digit.
inline constexpr float kLargestDigits = 32512;

/// The bytes of the digits of 64 columns, in shared memory. Byte 64 d + 16 t + 8 u + 4 h + b is digit d (0 low, 1 high)
/// of column 32 h + 8 t + c, where c is that of byte b of word u of DigitWords.
inline constexpr int kDigitChunkBytes = 128;
/// Where the digits of vector `vector` of a row lie, eight columns, from the row's first digit on.
__device__ inline int digit_offset(int vector) {
  return vector / 8 * kDigitChunkBytes + vector % 4 * 16 + vector / 4 % 2 * 4;
}

/// The digits of eight integers, in the order of the codes in a word of cuda/ops/linear/pack/format.hpp: word 0 of
/// a digit is of elements 0, 2, 1, 3, word 1 of elements 4, 6, 5, 7.
struct DigitWords {
  std::uint32_t low[2], high[2];

  /// Stores them at a row's digit_offset().
  __device__ void store(char* to) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      *reinterpret_cast<std::uint32_t*>(to + 8 * u) = low[u];
      *reinterpret_cast<std::uint32_t*>(to + 8 * u + kDigitChunkBytes / 2) = high[u];
    }
  }
};

/// The digits of eight integers. v[e] is the integer plus 128: its lowest byte is the low digit plus 128, the next byte
/// the high digit.
__device__ inline DigitWords digit_words(const unsigned (&v)[kVec]) {
  DigitWords words;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned even = __byte_perm(v[4 * half], v[4 * half + 2], 0x5140),
                   odd = __byte_perm(v[4 * half + 1], v[4 * half + 3], 0x5140);
    words.low[half] = __byte_perm(even, odd, 0x5410) ^ 0x80808080u;
    words.high[half] = __byte_perm(even, odd, 0x7632);
  }
  return words;
}

/// Integer sums of sixteen rows of codes with digits. Element 2r + d is of the lane's row g + 8r, with digit d (0 low,
/// 1 high) of the lane's pair of product columns. `high` has sixteen times the codes of the words' upper four bits.
struct DigitSums {
  int low[4], high[4];

  /// Adds a tile of 64 columns. `words` are the lane's 16 bytes of codes, `x` the digits of the lane's product column:
  /// of the codes in the words' lower bits in x.x and x.y, of the others in x.z and x.w.
  __device__ void add(const uint4& words, const uint4& x) {
    constexpr unsigned lower = 0x0f0f0f0fu, upper = 0xf0f0f0f0u;
    mma_bytes(low, words.x & lower, words.y & lower, words.z & lower, words.w & lower, x.x, x.y);
    mma_bytes(high, words.x & upper, words.y & upper, words.z & upper, words.w & upper, x.z, x.w);
  }
};

}  // namespace cf::cuda
