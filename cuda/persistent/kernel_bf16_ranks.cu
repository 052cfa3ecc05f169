#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* rank_kernels_bf16(Products products) {
  return find_persistent_kernel<bf16, false, false, 1, true>(products);
}

}  // namespace cf::cuda
