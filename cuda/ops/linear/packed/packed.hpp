#pragma once
#include "core/ops/linear.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear with a packed GPTQ weight by launches of gptq_most_tokens() tokens or fewer.
Status launch_packed(const ops::Linear::Args& args, const PackedLaunches& plan, LaunchList& launches);

}  // namespace cf::cuda
