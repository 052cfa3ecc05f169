#pragma once
#include "core/ops/linear.hpp"
#include "cuda/ops/linear/wgmma/packed_plan.hpp"
#include "cuda/ops/linear/wgmma/plan.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear on Hopper's tensor cores, with a dense weight.
Status launch_wgmma(const ops::Linear::Args& args, const LinearWgmmaPlan& plan, LaunchList& launches);
/// The same with a packed GPTQ weight.
Status launch_wgmma_packed(const ops::Linear::Args& args, const WgmmaPackedPlan& plan, LaunchList& launches);
/// The same with tiles of tokens, too.
Status launch_tiles_packed(const ops::Linear::Args& args, const PackedTilesPlan& plan, LaunchList& launches);

}  // namespace cf::cuda
