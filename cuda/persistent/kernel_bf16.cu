#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* persistent_kernels_bf16(int narrow_columns) {
  return find_persistent_kernel<bf16, false, 1>(narrow_columns);
}

}  // namespace cf::cuda
