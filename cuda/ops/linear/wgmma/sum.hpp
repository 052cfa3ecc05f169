#pragma once
#include "core/ops/linear_sum.hpp"
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/linear/wgmma/plan.hpp"

namespace cf::cuda {

/// linear_sum of dense weights on Hopper's tensor cores, in one launch: its ring runs on from the first product into
/// the second. The bits are those of the two products one after the other. Source: TRIALS.md, dense-products.
Result<LinearSumWgmmaPlan> plan_linear_sum_wgmma(const Target&, const ops::LinearSum::Args&);
Status launch_linear_sum_wgmma(const ops::LinearSum::Args&, const LinearSumWgmmaPlan&, LaunchList&);

}  // namespace cf::cuda
