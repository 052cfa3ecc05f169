#pragma once
// Private to cuda.
#include "core/status.hpp"
#include "cuda/fused/call.hpp"

namespace cf::cuda {

/// Launches the persistent kernel. A cooperative launch has all of its blocks resident at once, or is an error where
/// they cannot be; of any other, blocks that wait may hold the SMs of those that they wait for, until a wait's bound.
Status launch_decode_stack(const DecodeCall& call, DType dtype, bool cooperative, CUstream_st* stream);

/// Blocks that the device holds at once in the plan's clusters: those lie within a part of the GPU each.
Result<int> resident_cluster_blocks(const DecodeStackPlan& plan, DType dtype);

}  // namespace cf::cuda
