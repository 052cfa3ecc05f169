#include "cuda/persistent/kernel.cuh"

namespace cf::cuda {

const void* packed_kernel_bf16() { return packed_persistent_kernel<bf16, 1>(); }

}  // namespace cf::cuda
