#pragma once
#include "core/ops/linear.hpp"
#include "cuda/ops/linear/fp8/plan.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear with an fp8 weight by launches of up to 16 tokens, each of which reads the whole weight.
Status launch_gemv_fp8(const ops::Linear::Args& args, const GemvLaunches& plan, LaunchList& launches);

/// linear with an fp8 weight in one launch.
Status launch_tiles_fp8(const ops::Linear::Args& args, const Fp8TilesPlan& plan, LaunchList& launches);

}  // namespace cf::cuda
