#pragma once
#include "core/ops/linear.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear with a packed GPTQ weight by launches of up to 16 tokens. The arguments have been checked, but for the
/// weight's layout.
Status prepare_packed(const ops::Linear::Args& args, const PackedWeight& weight, LaunchList& launches);

}  // namespace cf::cuda
