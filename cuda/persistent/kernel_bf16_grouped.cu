#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* grouped_kernels_bf16(int narrow_columns) { return find_persistent_kernel<bf16, true, 1>(narrow_columns); }

}  // namespace cf::cuda
