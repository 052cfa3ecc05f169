#include "cuda/persistent/kernel.cuh"
#include "tests/cuda/two_blocks_kernel.hpp"

namespace cf::test {

const void* two_blocks_kernels_bf16(const cuda::PersistentPlan& plan) {
  if (plan.narrow_columns == cuda::kPackedColumns) return cuda::packed_persistent_kernel<bf16, 2>();
  return plan.share_heads > 1 ? cuda::find_persistent_kernel<bf16, true, 2>(plan.narrow_columns)
                              : cuda::find_persistent_kernel<bf16, false, 2>(plan.narrow_columns);
}

}  // namespace cf::test
