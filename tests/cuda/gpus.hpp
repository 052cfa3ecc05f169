#pragma once
// The GPUs of tests that take several.
#include <cuda_runtime_api.h>

#include <vector>

#include "tests/cuda/device_check.hpp"
#include "tests/cuda/part_skipped.hpp"

namespace cf::test {

inline int gpu_count() {
  int count = 0;
  require_cuda(cudaGetDeviceCount(&count));
  return count;
}

/// Whether there are fewer GPUs. CTest shows a test that asked for more as skipped.
inline bool lacks_gpus(int needed) {
  if (gpu_count() >= needed) return false;
  WARN("SKIPPED: " << needed << " GPUs are needed, there are " << gpu_count());
  part_skipped = true;
  return true;
}

/// The GPUs of so many ranks: one each, or the first for all.
inline std::vector<int> devices_of(int ranks, bool on_one) {
  std::vector<int> devices;
  for (int r = 0; r < ranks; ++r) devices.push_back(on_one ? 0 : r);
  return devices;
}

}  // namespace cf::test
