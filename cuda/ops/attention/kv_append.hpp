#pragma once
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/token_plan.hpp"

namespace cf::cuda {

/// A thread takes 16 bytes of a token's keys. Refuses a head_dim that is no multiple of 8.
Result<TokenPlan> plan_kv_append(const Target&, const ops::KvAppend::Args&);
Status launch_kv_append(const ops::KvAppend::Args&, const TokenPlan&, LaunchList&);

}  // namespace cf::cuda
