#pragma once
// The ops on a GPU for callers whose tensors are the host's. Holds no CUDA types, as device_timer.hpp.
#include <memory>

#include "core/ops/all.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// Runs one op at a time to its end: every tensor is copied to the device, what the op writes is copied back.
class DeviceOps {
 public:
  /// Refuses as DeviceTimer::create() does.
  static Result<DeviceOps> create(int device = 0);
  DeviceOps(DeviceOps&&) noexcept;
  DeviceOps& operator=(DeviceOps&&) noexcept;
  ~DeviceOps();

#define CF_OP(Op) Status run(const ops::Op::Args&);
#include "core/ops/ops.def"
#undef CF_OP
  /// The layer by the persistent kernel, which writes every site's output. The config's dtype is the weights'. Refuses what
  /// that kernel does not take. Where a block has waited too long, the outputs stay as they were.
  Status run_fused(const ops::DecodeLayer::Args&);

 private:
  struct State;
  explicit DeviceOps(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::apps
