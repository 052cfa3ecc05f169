#pragma once
#include <string>

#include "cuda/ops/kernel.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// A block copies a token's row.
struct EmbeddingPlan {
  int blocks, threads;
};
inline std::string to_string(const EmbeddingPlan& p) {
  return plan_text({{p.blocks, "blocks"}, {p.threads, "threads"}});
}

/// Refuses a hidden that is no multiple of 8.
Result<EmbeddingPlan> plan_embedding(const Target&, const ops::Embedding::Args&);
Status launch_embedding(const ops::Embedding::Args&, const EmbeddingPlan&, LaunchList&);

}  // namespace cf::cuda
