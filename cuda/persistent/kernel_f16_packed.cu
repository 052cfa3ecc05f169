#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* packed_kernel_f16() { return packed_persistent_kernel<f16, 1>(); }

}  // namespace cf::cuda
