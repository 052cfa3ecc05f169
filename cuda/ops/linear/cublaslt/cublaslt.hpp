#pragma once
#include "core/ops/linear.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// linear of many tokens by cuBLASLt, in the list's scratch memory. False, with nothing added, where linear's own
/// kernels take the call: few tokens, float32 activations, no library or no algorithm, scratch memory that is too
/// small, quantised weights beyond float16's range. The arguments have been checked, but for a packed weight's layout.
Result<bool> prepare_gemm(const ops::Linear::Args& args, LaunchList& launches);

}  // namespace cf::cuda
