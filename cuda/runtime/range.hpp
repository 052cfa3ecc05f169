#pragma once
// Names in the profiles of NVIDIA's tools. Private to cuda and the programs' benchmarks.
#include <nvtx3/nvToolsExt.h>

namespace cf::cuda {

/// A range of this thread's time with a name, from construction to destruction, in a profile of Nsight Systems or
/// Nsight Compute (NVTX). Without such a tool a range costs the call of an empty function.
class Range {
 public:
  explicit Range(const char* name) { nvtxRangePushA(name); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() { nvtxRangePop(); }
};

}  // namespace cf::cuda
