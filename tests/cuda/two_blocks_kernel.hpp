#pragma once
#include "core/dtype.hpp"

namespace cf::test {

/// The persistent kernel compiled for two blocks an SM (PersistentKernelLookup), so that an H200 runs the plans of an
/// RTX 5090, which have more blocks than it has SMs. Half of the registers a thread make it spill.
const void* two_blocks_kernels(int narrow_columns, DType dtype);

}  // namespace cf::test
