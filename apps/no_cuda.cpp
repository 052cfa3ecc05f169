// The GPU's side of the programs where the CUDA backend was not built: one line that says so.
#include "apps/device_bench.hpp"
#include "apps/device_ops.hpp"
#include "apps/device_timer.hpp"

namespace cf::apps {
namespace {

Status missing() {
  return Status::error(Code::unimplemented, "this build has no CUDA support: no nvcc was found when it was configured");
}

}  // namespace

struct DeviceTimer::State {};
DeviceTimer::DeviceTimer(DeviceTimer&&) noexcept = default;
DeviceTimer& DeviceTimer::operator=(DeviceTimer&&) noexcept = default;
DeviceTimer::~DeviceTimer() = default;
Result<DeviceTimer> DeviceTimer::create(int) { return missing(); }

struct DeviceOps::State {};
DeviceOps::DeviceOps(DeviceOps&&) noexcept = default;
DeviceOps& DeviceOps::operator=(DeviceOps&&) noexcept = default;
DeviceOps::~DeviceOps() = default;
Result<DeviceOps> DeviceOps::create(int) { return missing(); }
#define CF_OP(Op) \
  Status DeviceOps::run(const ops::Op::Args&) { return missing(); }
#include "core/ops/ops.def"
#undef CF_OP
Status DeviceOps::run_fused(const ops::DecodeLayer::Args&) { return missing(); }

Result<DeviceDescription> describe_device(const DeviceOptions&) { return missing(); }
Status bench_on_device(const DeviceBenchRequest&, const std::function<void(const LayerReport&)>&,
                       const std::function<void(const AblationReport&)>&) {
  return missing();
}

}  // namespace cf::apps
