#pragma once
// Private to the files of the CUDA backend.
#include <cuda_runtime_api.h>

#include "cuda/runtime/check.hpp"

namespace cf::python {

/// Makes a device the calling thread's until the guard's end. The thread may be another library's, such as torch's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    status_ = cuda::from_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (before_ != device_) (void)cudaSetDevice(before_);
  }

  const Status& status() const { return status_; }

 private:
  int device_, before_ = 0;
  Status status_;
};

}  // namespace cf::python
