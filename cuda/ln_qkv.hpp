#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/layernorm.hpp"
#include "cuda/linear.hpp"
#include "cuda/linear_gptq.hpp"

namespace cf::cuda {

/// How LayerNorm fused into the QKV product is laid out: linear's tiles, with the normalised tokens in every block's
/// shared memory.
struct LnQkvPlan {
  LinearPlan product;
  int tokens;  // at once
  int smem_bytes = 0;
};

/// A block of layernorm's, at eight elements a thread.
inline constexpr std::int64_t kMaxLnQkvHidden = max_layernorm_threads(8) * 8;

/// From one token to the next: 64 bytes more than whole lines, so that two tokens' 64 bytes lie in different banks.
constexpr int ln_qkv_row_bytes(std::int64_t hidden, std::int64_t element_bytes) {
  return int((hidden * element_bytes + 127) / 128 * 128 + 64);
}

/// A token, its place in the table and the cache and its norm's states.
constexpr int ln_qkv_token_bytes(std::int64_t hidden, std::int64_t element_bytes) {
  return ln_qkv_row_bytes(hidden, element_bytes) + 8 + int((hidden + 255) / 256) * 12;
}

/// As many tokens at once as fit, up to 16; 0 where not even one does. The norm's weights lie beside them, and each
/// token's place in the table and the cache and its norm's states.
constexpr LnQkvPlan ln_qkv_plan(const Arch& arch, std::int64_t hidden, std::int64_t out, std::int64_t tokens,
                                std::int64_t element_bytes, std::int64_t weight_bytes) {
  constexpr int static_bytes = 2 * kLinearWarps * kMmaTokens * kTileRows * 4;  // LinearSmem
  const int a_token = ln_qkv_token_bytes(hidden, element_bytes);
  LnQkvPlan p{.product = {}, .tokens = int(std::min<std::int64_t>(tokens, kMmaTokens))};
  if (hidden > kMaxLnQkvHidden) p.tokens = 0;
  for (; p.tokens > 0; --p.tokens) {
    p.product = linear_plan(arch, hidden, out, p.tokens);
    p.smem_bytes = int(2 * hidden * weight_bytes) + p.tokens * a_token;
    if (p.smem_bytes + static_bytes <= arch.smem_per_block_bytes) break;
  }
  return p;
}

/// The same with four-bit tiles.
struct LnQkvGptqPlan {
  GptqPlan product;  // its smem_bytes are where the tokens begin
  int smem_bytes;
};

constexpr LnQkvGptqPlan ln_qkv_gptq_plan(const Arch& arch, const GptqSizes& sizes, std::int64_t hidden,
                                         std::int64_t tokens, std::int64_t weight_bytes) {
  const int a_token = ln_qkv_token_bytes(hidden, 2);
  const int norm_bytes = int(2 * hidden * weight_bytes);
  LnQkvGptqPlan p{.product = gptq_plan(arch, sizes, tokens, kLnQkvGptqTurns, 1, norm_bytes, a_token), .smem_bytes = 0};
  if (hidden > kMaxLnQkvHidden) p.product.grid = 0;
  p.smem_bytes = p.product.smem_bytes + norm_bytes + p.product.tokens * a_token;
  return p;
}

}  // namespace cf::cuda
