// The GPU benchmarks of a build without the CUDA backend: each call is refused.
#include "apps/bench/device_bench.hpp"
#include "apps/bench/device_model.hpp"
#include "apps/bench/device_timer.hpp"
#include "apps/bench/op_bench.hpp"
#include "apps/verify/device_ops.hpp"

namespace cf::apps {

struct DeviceTimer::State {
  DeviceInfo info;
};
DeviceTimer::DeviceTimer(DeviceTimer&&) noexcept = default;
DeviceTimer& DeviceTimer::operator=(DeviceTimer&&) noexcept = default;
DeviceTimer::~DeviceTimer() = default;
Result<DeviceTimer> DeviceTimer::create(int) { return no_cuda(); }
const DeviceInfo& DeviceTimer::info() const { return state_->info; }
Result<std::vector<double>> DeviceTimer::read_bytes_per_s(const BenchOptions&) { return no_cuda(); }

Result<std::unique_ptr<DeviceBench>> DeviceBench::create(DeviceBenchRequest) { return no_cuda(); }

Result<DeviceModelBytes> device_model_bytes(const ModelSpec&, const ModelWeights&, const DeviceModelOptions&) {
  return no_cuda();
}
Result<DeviceModelPlan> plan_device_model(DeviceTimer&, const ModelSpec&, const ModelWeights&,
                                          const DeviceModelOptions&) {
  return no_cuda();
}
std::int64_t gpu_count() { return 0; }
Result<double> free_device_bytes(DeviceTimer&) { return no_cuda(); }
Status check_device_memory(DeviceTimer&, const std::string&, const ModelSpec&, const ModelWeights&,
                           const DeviceModelOptions&) {
  return no_cuda();
}
Result<DeviceModel> open_device_model(DeviceTimer&, const std::string&, const ModelSpec&, const ModelWeights&,
                                      const DeviceModelOptions&, const LayerOf&) {
  return no_cuda();
}
std::string product_library() { return {}; }
std::vector<std::string> product_algorithms() { return {}; }

Status bench_ops(const OpBenchRequest&, const OpBenchSink&) { return no_cuda(); }

}  // namespace cf::apps
