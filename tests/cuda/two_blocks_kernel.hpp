#pragma once
#include "core/dtype.hpp"
#include "cuda/persistent/plan.hpp"

namespace cf::test {

/// The persistent kernel compiled for two blocks an SM (PersistentKernelLookup), so that an H200 runs the plans of an
/// RTX 5090, which have more blocks than it has SMs. Half of the registers a thread make it spill.
const void* two_blocks_kernels_f16(const cuda::PersistentPlan& plan);
const void* two_blocks_kernels_bf16(const cuda::PersistentPlan& plan);
inline const void* two_blocks_kernels(const cuda::PersistentPlan& plan, DType dtype) {
  return dtype == DType::f16 ? two_blocks_kernels_f16(plan) : two_blocks_kernels_bf16(plan);
}

}  // namespace cf::test
