#pragma once
// Device memory whose contents come late, for kernels that must wait for the one before them.
#include <cstddef>
#include <span>

#include "tests/cuda/device_bytes.hpp"
#include "tests/cuda/device_problem.hpp"

namespace cf::test {

/// The contents of a block of device memory, which is there for longer than this.
class LateBytes {
 public:
  explicit LateBytes(const DeviceBytes& block)
      : contents_(std::span<const std::byte>(block.data(), block.size())),
        pair_{block.data(), contents_.data(), block.size()},
        on_device_(std::as_bytes(std::span(&pair_, 1))) {}

  /// Makes the block NaN. Then a slow kernel on the stream restores it, and the next kernel there may start before that.
  void restore(cudaStream_t stream) const {
    require_cuda(cudaMemset(pair_.data, 0xff, pair_.bytes));
    require_cuda(cudaDeviceSynchronize());
    restore_late(reinterpret_cast<const BytePair*>(on_device_.data()), 1, stream);
  }

 private:
  DeviceBytes contents_;
  BytePair pair_;
  DeviceBytes on_device_;
};

}  // namespace cf::test
