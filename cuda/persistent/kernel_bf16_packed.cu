#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* packed_kernels_bf16(int narrow_columns) { return packed_persistent_kernel<bf16, 1>(narrow_columns); }

}  // namespace cf::cuda
