#pragma once
#include <cstdint>
#include <string>

#include "cuda/ops/kernel.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// How qk_norm's kernel covers its heads: a warp holds one head of one token in its registers.
struct QkNormPlan {
  std::int64_t heads;  // of all tokens: q's, k's and v's
  int threads;         // of a block, whole warps

  constexpr std::int64_t blocks() const { return (heads + threads / 32 - 1) / (threads / 32); }
};

inline std::string to_string(const QkNormPlan& p) {
  return plan_text({{p.blocks(), "blocks"}, {p.threads / 32, "heads a block"}});
}

/// The largest head that a warp holds in its registers.
inline constexpr std::int64_t kMaxNormedHeadDim = 256;

/// Refuses a head_dim that is not a multiple of 8, or is larger than kMaxNormedHeadDim.
Result<QkNormPlan> plan_qk_norm(const Target&, const ops::QkNorm::Args&);

Status launch_qk_norm(const ops::QkNorm::Args&, const QkNormPlan&, LaunchList&);

}  // namespace cf::cuda
