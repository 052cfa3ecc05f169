#pragma once
#include "core/ops/linear.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear by linear_wgmma_plan(). False, with nothing added, where another kernel takes the call: see
/// is_linear_wgmma(); and on another GPU than Hopper's, whatever the plans are for. The arguments have been checked.
Result<bool> prepare_linear_wgmma(const ops::Linear::Args& args, LaunchList& launches);
/// The same for a packed GPTQ weight: see is_gptq_wgmma().
Result<bool> prepare_linear_wgmma(const ops::Linear::Args& args, const PackedWeight& weight, LaunchList& launches);

}  // namespace cf::cuda
