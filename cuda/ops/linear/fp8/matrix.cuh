#pragma once
// An fp8 matrix as kernels take it, and its codes as operands of tensor cores.
#include <algorithm>
#include <cstdint>

#include "core/dtype.hpp"
#include "core/fp8.hpp"

namespace cf::cuda {

/// Fp8Weight in device memory.
struct Fp8Matrix {
  const std::uint8_t* codes;  // (rows, in)
  const float* scales;        // (rows, groups)
  int rows, in, groups, group_size;
};

inline Fp8Matrix fp8_matrix(const Fp8Weight& w) {
  return {reinterpret_cast<const std::uint8_t*>(w.codes),
          w.scales,
          int(w.out),
          int(w.in),
          int(w.groups()),
          int(std::min(w.group_size, w.in))};
}

/// Four codes as two pairs of 16-bit numbers, which they are exactly.
struct Fp8Pairs {
  std::uint32_t first, second;
};

__device__ inline Fp8Pairs fp8_pairs(std::uint32_t codes, f16) {
  Fp8Pairs p;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(p.first), "=r"(p.second)
      : "r"(codes));
  return p;
}

/// There is no such instruction for bfloat16. A code's exponent has 4 bits and a bfloat16's 8, whose bias is larger by
/// 120: with the code's bits behind the sign where bfloat16 has them, and zeros between, the number is 2^120 times too
/// small. The multiplication is exact, and makes normal numbers of a code's subnormal ones. NaN becomes +-480.
__device__ inline Fp8Pairs fp8_pairs(std::uint32_t codes, bf16) {
  // A pair's bytes, each below eight copies of its sign.
  const auto spread = [&](std::uint32_t selector) {
    std::uint32_t bits;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bits) : "r"(codes), "r"(selector));
    return bits << 4 & 0x87f087f0u;
  };
  const auto scaled = [](std::uint32_t pair) {
    constexpr std::uint32_t two_to_120 = 0x7b807b80;
    std::uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(two_to_120));
    return product;
  };
  return {scaled(spread(0x9180)), scaled(spread(0xb3a2))};
}

}  // namespace cf::cuda
