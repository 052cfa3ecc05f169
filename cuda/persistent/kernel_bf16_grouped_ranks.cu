#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* grouped_rank_kernels_bf16(Products products) {
  return find_persistent_kernel<bf16, false, true, 1, true>(products);
}

}  // namespace cf::cuda
