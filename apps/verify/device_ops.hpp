#pragma once
// Runs ops on a GPU with tensors of the host. The header names no CUDA types: the programs include it in every build.
#include <memory>

#include "core/ops/all.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// The error of every call in a build without the CUDA backend.
Status no_cuda();

/// Runs one op at a time. A call copies the op's tensors to the device, waits for the op, and copies its outputs and
/// states back.
class DeviceOps {
 public:
  /// Refuses a device that is missing or that the kernels were not compiled for, and a build without the CUDA backend.
  static Result<DeviceOps> create(int device = 0);
  DeviceOps(DeviceOps&&) noexcept;
  DeviceOps& operator=(DeviceOps&&) noexcept;
  ~DeviceOps();

#define CF_OP(Op) Status run(const ops::Op::Args&);
#include "core/ops/ops.def"
#undef CF_OP
  /// Runs a layer as one launch of the persistent kernel, which writes the output of every site. Refuses what that
  /// kernel does not take. Where a block's wait exceeds its bound, the call is an error and the outputs stay as they
  /// were.
  Status run_layer(const ops::DecodeLayer::Args&);

 private:
  struct State;
  explicit DeviceOps(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::apps
