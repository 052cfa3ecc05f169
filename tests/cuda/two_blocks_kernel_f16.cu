#include "cuda/persistent/kernel.cuh"
#include "tests/cuda/two_blocks_kernel.hpp"

namespace cf::test {

const void* two_blocks_kernels_f16(const cuda::PersistentPlan& plan) {
  if (cuda::is_packed(plan.products)) return cuda::find_persistent_kernel<f16, true, false, 2>(plan.products);
  return plan.gqa_heads > 1 ? cuda::find_persistent_kernel<f16, false, true, 2>(plan.products)
                            : cuda::find_persistent_kernel<f16, false, false, 2>(plan.products);
}

}  // namespace cf::test
