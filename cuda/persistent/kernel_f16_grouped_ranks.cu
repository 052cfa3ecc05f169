#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* grouped_rank_kernels_f16(Products products) {
  return find_persistent_kernel<f16, false, true, 1, true>(products);
}

}  // namespace cf::cuda
