#include "cuda/persistent/kernel.cuh"
#include "tests/cuda/two_blocks_kernel.hpp"

namespace cf::test {

const void* two_blocks_kernels_f16(const cuda::PersistentPlan& plan) {
  if (cuda::is_packed(plan.narrow_columns)) return cuda::packed_persistent_kernel<f16, 2>(plan.narrow_columns);
  return plan.share_heads > 1 ? cuda::find_persistent_kernel<f16, true, 2>(plan.narrow_columns)
                              : cuda::find_persistent_kernel<f16, false, 2>(plan.narrow_columns);
}

}  // namespace cf::test
