#pragma once
#include "core/ops/linear.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// Adds a GEMM by cuBLASLt, in the list's scratch memory, with the kernels before and behind it. False, with nothing
/// added, where the library has no algorithm for the product on the list's device.
Result<bool> add_gemm(const ops::Linear::Args& args, const GemmPlan& plan, LaunchList& launches);

}  // namespace cf::cuda
