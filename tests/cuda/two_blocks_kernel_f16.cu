#include "cuda/persistent/kernel.cuh"
#include "tests/cuda/two_blocks_kernel.hpp"

namespace cf::test {

const void* two_blocks_kernels_f16(int narrow_columns) { return cuda::find_persistent_kernel<f16, 2>(narrow_columns); }

}  // namespace cf::test
