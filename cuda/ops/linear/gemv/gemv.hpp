#pragma once
#include "core/ops/linear.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear with a dense weight by launches of up to 16 tokens, each of which reads the whole weight. The arguments have
/// been checked.
Status prepare_gemv(const ops::Linear::Args& args, LaunchList& launches);

}  // namespace cf::cuda
