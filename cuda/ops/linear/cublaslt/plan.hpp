#pragma once
// GEMM by cuBLASLt: from how many tokens on, and what scratch memory it takes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>

#include "core/dtype.hpp"
#include "core/ops/linear.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// Why cuBLASLt does not multiply rows of x of this size and dtype. Empty where it does.
constexpr std::string_view why_no_gemm_row(std::int64_t in, DType activation) {
  if (activation != DType::f16 && activation != DType::bf16) return "takes 16-bit activations";
  return in % 8 == 0 ? "" : "takes rows of a multiple of 8";
}

/// Why a product does not go through cuBLASLt, though the library, an algorithm and scratch memory are there. Empty for
/// a product of many tokens in 16 bits with aligned rows of x, which does. A packed weight is dequantised first: see
/// gptq_parts().
constexpr std::string_view why_no_gemm(const Arch& arch, std::int64_t tokens, std::int64_t in, DType activation,
                                       bool packed) {
  if (tokens <= (packed ? arch.tuning->packed_tokens : arch.tuning->gemv_tokens)) return "takes more tokens";
  return why_no_gemm_row(in, activation);
}
constexpr bool is_gemm(const Arch& arch, std::int64_t tokens, std::int64_t in, DType activation, bool packed) {
  return why_no_gemm(arch, tokens, in, activation, packed).empty();
}

/// The most tokens for which no GPU multiplies by cuBLASLt. Scratch memory is asked for before there is a device.
constexpr std::int64_t tokens_without_gemm(bool packed) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const Tuning* t : {&kH100Tuning, &kH200Tuning, &kRtx5090Tuning})
    least = std::min(least, packed ? t->packed_tokens : t->gemv_tokens);
  return least;
}

/// The workspace that cuBLASLt may take for a product: it counts tiles there. What divides the columns takes more.
inline constexpr std::size_t kGemmWorkspaceBytes = 4096;

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

/// How a call lies in scratch memory.
struct GemmPlan {
  int parts;      // of a dequantised weight; 0 for a dense weight
  bool has_sums;  // float32 sums that are finished by a kernel of their own
  GemmScratch at;
};

inline std::string to_string(const GemmPlan& p) {
  return plan_text({{p.parts, "matrices of a dequantised weight"}, {std::int64_t(p.at.bytes), "B of scratch memory"}}) +
         (p.has_sums ? ", float32 sums" : "");
}

/// The plan of a call that is_gemm(). cuBLASLt adds a bias of the output's dtype alone. For rows of y that
/// are not aligned it has kernels that round the product before they add.
inline GemmPlan gemm_plan(const ops::Linear::Args& a) {
  const auto d = ops::Linear::dims(a);
  const DType dtype = a.x.dtype;
  const auto* const packed = std::get_if<PackedWeight>(&a.linear.weight);
  const bool adds = a.linear.bias || a.residual;
  const bool has_function = ops::is_gelu(a.epilogue) || a.epilogue == ops::Epilogue::swiglu;
  const bool has_sums = has_function || (a.linear.bias && a.linear.bias.dtype != dtype) || (adds && d.out % 8);
  const int parts = packed ? gptq_parts(dtype, packed->format.bits) : 0;
  return {parts, has_sums, gemm_scratch(d.tokens, d.in, d.rows(), parts, has_sums)};
}

/// The bytes of scratch memory with which a call may go through cuBLASLt; 0 for a call that it takes on no GPU.
inline std::size_t gemm_scratch_bytes(const ops::Linear::Args& a) {
  const auto d = ops::Linear::dims(a);
  const bool is_packed = std::holds_alternative<PackedWeight>(a.linear.weight);
  return d.tokens > tokens_without_gemm(is_packed) && why_no_gemm_row(d.in, a.x.dtype).empty() ? gemm_plan(a).at.bytes
                                                                                               : 0;
}

}  // namespace cf::cuda
