#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* persistent_kernels_f16(int narrow_columns) { return find_persistent_kernel<f16, false, 1>(narrow_columns); }

}  // namespace cf::cuda
