#pragma once
#include "core/ops/linear_sum.hpp"
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/linear/packed/plan.hpp"

namespace cf::cuda {

/// Rows of a token that linear_sum's launch finishes at once.
inline constexpr int kLinearSumRows = 2;

/// linear_sum of packed GPTQ weights in one launch. The bits are those of the two products one after the other. One
/// launch instead of two saves 2 to 3 us of waiting, which a layer of int4 weights has no other work to hide.
Result<GptqSumPlan> plan_linear_sum(const Target&, const ops::LinearSum::Args&);
Status launch_linear_sum(const ops::LinearSum::Args&, const GptqSumPlan&, LaunchList&);

}  // namespace cf::cuda
