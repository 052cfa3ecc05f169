#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* grouped_kernels_f16(int narrow_columns) { return find_persistent_kernel<f16, true, 1>(narrow_columns); }

}  // namespace cf::cuda
