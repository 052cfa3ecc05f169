#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/norm/layernorm.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// How the kernel of LayerNorm fused into the QKV product is laid out: like linear's, with all normalised tokens in
/// every block's shared memory.
struct LnQkvPlan {
  GemvPlan product;
  int tokens;  // of a launch
  int smem_bytes = 0;
};

inline std::string to_string(const LnQkvPlan& p) {
  return plan_text({{p.tokens, "tokens a launch"}}) + ", " + to_string(p.product) + ", " +
         plan_text({{p.smem_bytes, "B of shared memory"}});
}

/// The longest row that a block of layernorm takes at eight elements a thread.
inline constexpr std::int64_t kMaxLnQkvHidden = max_layernorm_threads(8) * 8;

/// Bytes from one token to the next in shared memory: 64 more than whole lines of 128, so that 64 bytes of a token and
/// of the next token lie in different banks.
constexpr int ln_qkv_row_bytes(std::int64_t hidden, std::int64_t element_bytes) {
  return int((hidden * element_bytes + 127) / 128 * 128 + 64);
}

/// Bytes of shared memory that a token takes: its elements, its rows of the RoPE table and of the cache (8 bytes), and
/// its norm's states.
constexpr int ln_qkv_token_bytes(std::int64_t hidden, std::int64_t element_bytes) {
  return ln_qkv_row_bytes(hidden, element_bytes) + 8 + int((hidden + 255) / 256) * 12;
}

/// The plan for as many tokens as fit beside the norm's weights, up to 16; for 0 tokens where not even one fits.
constexpr LnQkvPlan ln_qkv_plan(const Arch& arch, std::int64_t hidden, std::int64_t out, std::int64_t tokens,
                                std::int64_t element_bytes, std::int64_t weight_bytes) {
  constexpr int static_bytes = 2 * kGemvWarps * kMmaTokens * kTileRows * 4;  // GemvSmem
  const int a_token = ln_qkv_token_bytes(hidden, element_bytes);
  LnQkvPlan p{.product = {}, .tokens = int(std::min<std::int64_t>(tokens, kMmaTokens))};
  if (hidden > kMaxLnQkvHidden) p.tokens = 0;
  for (; p.tokens > 0; --p.tokens) {
    p.product = gemv_plan(arch, hidden, out, p.tokens);
    p.smem_bytes = int(2 * hidden * weight_bytes) + p.tokens * a_token;
    if (p.smem_bytes + static_bytes <= arch.smem_per_block_bytes) break;
  }
  return p;
}

/// The same with a packed four-bit weight. The tokens lie in shared memory behind the product's product.smem_bytes.
struct LnQkvGptqPlan {
  GptqPlan product;
  int smem_bytes;
};

inline std::string to_string(const LnQkvGptqPlan& p) {
  return to_string(p.product) + ", " + plan_text({{p.smem_bytes, "with the tokens"}});
}

constexpr LnQkvGptqPlan ln_qkv_gptq_plan(const Arch& arch, const GptqSizes& sizes, std::int64_t hidden,
                                         std::int64_t tokens, std::int64_t weight_bytes) {
  const int a_token = ln_qkv_token_bytes(hidden, 2);
  const int norm_bytes = int(2 * hidden * weight_bytes);
  LnQkvGptqPlan p{.product = gptq_plan(arch, sizes, tokens, kLnQkvGptqTurns, 1, {norm_bytes, a_token}),
                  .smem_bytes = 0};
  if (hidden > kMaxLnQkvHidden) p.product.grid = 0;
  p.smem_bytes = p.product.smem_bytes + norm_bytes + p.product.tokens * a_token;
  return p;
}

/// Whether the kernel for one token and slices of up to `chunks` chunks leaves registers for a block of linear on its
/// SM: LaunchMode::shares_sms.
constexpr bool ln_qkv_can_share_sms(int chunks) { return chunks <= kGptqMaxChunks; }
/// The number of threads that the compiler divides an SM's registers among, for the kernel with a packed weight: those
/// of ln_qkv's block, and of a block of linear where the two share SMs.
constexpr int ln_qkv_register_threads(bool one_token, int chunks) {
  const bool shares = one_token && ln_qkv_can_share_sms(chunks);
  return gptq_threads(kLnQkvGptqTurns) + (shares ? gptq_threads(kLinearGptqTurns) : 0);
}

/// The launches of a call with a dense weight, and with a packed one.
struct LnQkvDense {
  LnQkvPlan plan;
};
struct LnQkvPacked {
  GptqLayout layout;
  GptqSizes sizes;
  std::vector<LnQkvGptqPlan> launches;
};
inline std::string to_string(const LnQkvDense& p) { return to_string(p.plan); }
inline std::string to_string(const LnQkvPacked& p) {
  return plan_text({{std::int64_t(p.launches.size()), "launches"}}) + ", " + to_string(p.launches.front());
}

/// The plans of the kernels. All refuse a hidden or head_dim that is no multiple of 8, a hidden that no plan has room
/// for, and a packed weight whose rows are in another order than that of pack_hint().
Result<LnQkvPacked> plan_ln_qkv_packed(const Target&, const ops::LnQkv::Args&);
Result<LnQkvDense> plan_ln_qkv_dense(const Target&, const ops::LnQkv::Args&);
Result<LnQkvPacked> plan_ln_qkv_heads_packed(const Target&, const ops::LnQkvHeads::Args&);
Result<LnQkvDense> plan_ln_qkv_heads_dense(const Target&, const ops::LnQkvHeads::Args&);
Status launch_ln_qkv_packed(const ops::LnQkv::Args&, const LnQkvPacked&, LaunchList&);
Status launch_ln_qkv_dense(const ops::LnQkv::Args&, const LnQkvDense&, LaunchList&);
Status launch_ln_qkv_heads_packed(const ops::LnQkvHeads::Args&, const LnQkvPacked&, LaunchList&);
Status launch_ln_qkv_heads_dense(const ops::LnQkvHeads::Args&, const LnQkvDense&, LaunchList&);

}  // namespace cf::cuda
