#pragma once
#include "core/ops/linear.hpp"
#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear with a dense weight by launches of up to 16 tokens, each of which reads the whole weight.
Status launch_gemv(const ops::Linear::Args& args, const GemvLaunches& plan, LaunchList& launches);

}  // namespace cf::cuda
