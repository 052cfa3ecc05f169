#pragma once
// Products of many tokens: from how many tokens on, and what scratch memory they take.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"

namespace cf::cuda {

/// Up to this many tokens, linear's own kernels multiply by a dense weight: they take up to 16 tokens a launch, and
/// read the whole weight in every launch. On an H200 a prompt of 16 ids takes Pythia-2.8B 2.9 ms with them, 2.4 ms with
/// cuBLASLt, and 2.0 ms with wgmma/plan.hpp's products, which take up to 128 tokens there.
inline constexpr std::int64_t kGemmTokens = 8;
/// The same of a packed GPTQ weight, which a product of many tokens must dequantise first: it writes and reads two or
/// three 16-bit matrices (see gptq_parts()). A layer of Pythia-2.8B's products takes 55 us for 16 tokens with the
/// kernels that take 16 tokens a launch, and 228 us for 64 tokens with cuBLASLt, on an H200.
inline constexpr std::int64_t kGptqGemmTokens = 64;

/// Whether a product goes through cuBLASLt, where the library, an algorithm and scratch memory are there: one of many
/// tokens, in 16 bits, whose rows of x are aligned.
constexpr bool is_gemm(std::int64_t tokens, std::int64_t in, DType activation, bool packed) {
  return tokens > (packed ? kGptqGemmTokens : kGemmTokens) && in % 8 == 0 &&
         (activation == DType::f16 || activation == DType::bf16);
}

/// The workspace that cuBLASLt may take for a product. NVIDIA recommends 32 MiB for Hopper.
inline constexpr std::size_t kGemmWorkspaceBytes = std::size_t(32) << 20;

/// How many 16-bit matrices add up to a GPTQ weight W = s (q - z), exactly.
///   One is not enough. Rounding W to 16 bits changes every product by up to u |x W|, with u the unit roundoff of 16
///   bits. The sum's error is then up to u sum_k |x_k W_k|, and 0.4 u ||x W||_2 where the roundings are independent.
///   The budget of linear has one u, for the rounding of y, and otherwise float32's unit roundoff: where the sum
///   cancels, ||x W||_2 is many times y, and the budget does not hold.
///   W has 15 significant bits with 4-bit codes (11 of s, 4 of the difference, or a difference of 16) and 19 with 8-bit
///   codes. Two float16 numbers hold 22 bits. Two bfloat16 numbers hold 16 and three hold 24. Every float16 scale is a
///   multiple of 2^-24, the least float16 number, so that no part is lost below float16's range.
constexpr int gptq_parts(DType activation, int bits) { return activation == DType::bf16 && bits == 8 ? 3 : 2; }
inline constexpr int kMostGptqParts = 3;

/// Where the parts of a product's scratch memory begin, behind cuBLASLt's workspace. An absent part has no bytes.
struct GemmScratch {
  std::size_t weight;  // (out, parts * in)     a dequantised weight's parts side by side, the smallest first
  std::size_t x;       // (tokens, parts * in)  the activations, once for each part
  std::size_t sums;    // (tokens, out)         in float32, for what rounds them once, after its own function
  std::size_t bytes;
};

/// `parts` is 0 for a dense weight.
constexpr GemmScratch gemm_scratch(std::int64_t tokens, std::int64_t in, std::int64_t out, int parts, bool has_sums) {
  const auto size = [](std::int64_t elements, std::size_t element_bytes) {
    return (std::size_t(elements) * element_bytes + 255) / 256 * 256;
  };
  GemmScratch s{.weight = kGemmWorkspaceBytes, .x = 0, .sums = 0, .bytes = 0};
  s.x = s.weight + size(out * parts * in, 2);
  s.sums = s.x + size(tokens * parts * in, 2);
  s.bytes = s.sums + (has_sums ? size(tokens * out, 4) : 0);
  return s;
}

}  // namespace cf::cuda
