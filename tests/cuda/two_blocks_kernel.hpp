#pragma once
#include "core/dtype.hpp"

namespace cf::test {

/// The persistent kernel compiled for two blocks an SM (PersistentKernelLookup), so that an H200 runs the plans of an
/// RTX 5090, which have more blocks than it has SMs. Half of the registers a thread make it spill.
const void* two_blocks_kernels_f16(int narrow_columns);
const void* two_blocks_kernels_bf16(int narrow_columns);
inline const void* two_blocks_kernels(int narrow_columns, DType dtype) {
  return dtype == DType::f16 ? two_blocks_kernels_f16(narrow_columns) : two_blocks_kernels_bf16(narrow_columns);
}

}  // namespace cf::test
