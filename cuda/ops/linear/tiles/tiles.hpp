#pragma once
#include "core/ops/linear.hpp"
#include "cuda/ops/linear/tiles/plan.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear by linear_tiles_plan(). False, with nothing added, where another kernel takes the call: see
/// is_linear_tiles(); and on another GPU than Hopper's, whatever the plans are for. The arguments have been checked.
Result<bool> prepare_linear_tiles(const ops::Linear::Args& args, LaunchList& launches);

/// The same by a layout of linear_tiles_layout(), for the calls that the plan takes.
Result<bool> prepare_linear_tiles(const ops::Linear::Args& args, const LinearTilesPlan& plan, LaunchList& launches);

}  // namespace cf::cuda
