// The GPU benchmarks of a build without the CUDA backend: each call is refused.
#include "apps/bench/device_bench.hpp"
#include "apps/bench/device_timer.hpp"
#include "apps/bench/op_bench.hpp"
#include "apps/verify/device_ops.hpp"

namespace cf::apps {

struct DeviceTimer::State {};
DeviceTimer::DeviceTimer(DeviceTimer&&) noexcept = default;
DeviceTimer& DeviceTimer::operator=(DeviceTimer&&) noexcept = default;
DeviceTimer::~DeviceTimer() = default;
Result<DeviceTimer> DeviceTimer::create(int) { return no_cuda(); }

Result<DeviceDescription> describe_device(const DeviceOptions&) { return no_cuda(); }
Status check_on_device(const DeviceBenchRequest&) { return no_cuda(); }
Status bench_on_device(const DeviceBenchRequest&, const DeviceBenchSink&) { return no_cuda(); }

Status bench_ops(const OpBenchRequest&, const OpBenchSink&) { return no_cuda(); }

}  // namespace cf::apps
