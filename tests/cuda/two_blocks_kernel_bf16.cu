#include "cuda/persistent/kernel.cuh"
#include "tests/cuda/two_blocks_kernel.hpp"

namespace cf::test {

const void* two_blocks_kernels_bf16(const cuda::PersistentPlan& plan) {
  if (cuda::is_packed(plan.narrow_columns)) return cuda::packed_persistent_kernel<bf16, 2>(plan.narrow_columns);
  return plan.share_heads > 1 ? cuda::find_persistent_kernel<bf16, true, 2>(plan.narrow_columns)
                              : cuda::find_persistent_kernel<bf16, false, 2>(plan.narrow_columns);
}

}  // namespace cf::test
