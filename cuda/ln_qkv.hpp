#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/linear.hpp"

namespace cf::cuda {

/// How LayerNorm fused into the QKV product is laid out: linear's tiles, with the normalised tokens in every block's
/// shared memory.
struct LnQkvPlan {
  LinearPlan product;
  int tokens;     // at once
  int row_bytes;  // from one token to the next in shared memory
  int smem_bytes = 0;
};

/// As many tokens at once as fit, up to 16. The norm's weights and the block's biases lie beside them as float32, and each
/// token's cosines, sines, mean, rstd and place in the cache.
constexpr LnQkvPlan ln_qkv_plan(const Arch& arch, std::int64_t hidden, std::int64_t out, std::int64_t rotary_dim,
                                std::int64_t tokens, std::int64_t element_bytes) {
  constexpr int static_bytes = 2 * kLinearWarps * kMmaTokens * kTileRows * 4;  // LinearSmem
  // 64 bytes more than whole lines: two tokens' 64 bytes lie in different banks.
  const int row_bytes = int((hidden * element_bytes + 127) / 128 * 128 + 64);
  const int a_token = row_bytes + int(rotary_dim) * 4 + 16;
  LnQkvPlan p{.product = {}, .tokens = int(std::min<std::int64_t>(tokens, kMmaTokens)), .row_bytes = row_bytes};
  for (; p.tokens > 0; --p.tokens) {
    p.product = linear_plan(arch, hidden, out, p.tokens);
    p.smem_bytes = int(2 * hidden + linear_block_rows(p.product, out)) * 4 + p.tokens * a_token;
    if (p.smem_bytes + static_bytes <= arch.smem_per_block_bytes) break;
  }
  return p;
}

}  // namespace cf::cuda
