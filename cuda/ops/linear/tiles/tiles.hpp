#pragma once
#include "core/ops/linear.hpp"
#include "cuda/ops/linear/tiles/plan.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear by a layout of linear_tiles_layout().
Status launch_tiles(const ops::Linear::Args& args, const LinearTilesPlan& plan, LaunchList& launches);

}  // namespace cf::cuda
