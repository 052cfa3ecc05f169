#include "apps/bench/device_timer.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "apps/bench/device_probe.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/stream.hpp"

namespace cf::apps {
namespace {

using cuda::from_cuda;

// Runs whose events are in flight at a time.
constexpr std::int64_t kRunsAtOnce = 256;

std::string version(int encoded) { return std::to_string(encoded / 1000) + "." + std::to_string(encoded % 1000 / 10); }

Result<DeviceInfo> device_info(const cuda::Context& context) {
  cudaDeviceProp p;
  int driver = 0, runtime = 0, memory_khz = 0, sm_khz = 0;
  for (const cudaError_t e :
       {cudaGetDeviceProperties(&p, context.device()), cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime),
        cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, context.device()),
        cudaDeviceGetAttribute(&sm_khz, cudaDevAttrClockRate, context.device())})
    CF_TRY(from_cuda(e, "device properties"));
  return DeviceInfo{.name = p.name,
                    .driver = version(driver),
                    .runtime = version(runtime),
                    .memory_clock_mhz = memory_khz * 1e-3,
                    .sm_clock_mhz = sm_khz * 1e-3,
                    .memory_bytes = p.totalGlobalMem,
                    .l2_bytes = std::size_t(p.l2CacheSize)};
}

}  // namespace

struct DeviceTimer::State {
  DeviceInfo info;
  cuda::Stream stream;
  cuda::Context context;
  std::vector<cuda::Event> events;  // kRunsAtOnce + 1
};

DeviceTimer::DeviceTimer(std::unique_ptr<State> state) : state_(std::move(state)) {}
DeviceTimer::DeviceTimer(DeviceTimer&&) noexcept = default;
DeviceTimer& DeviceTimer::operator=(DeviceTimer&&) noexcept = default;
DeviceTimer::~DeviceTimer() = default;

Result<DeviceTimer> DeviceTimer::create(int device) {
  // A stream belongs to the current device, which Context::create() sets.
  CF_TRY(cuda::Context::create(device).status());
  CF_TRY_ASSIGN(cuda::Stream stream, cuda::make_stream());
  CF_TRY_ASSIGN(cuda::Context context, cuda::Context::create(device, stream.get()));
  CF_TRY_ASSIGN(DeviceInfo info, device_info(context));
  auto state = std::make_unique<State>(State{std::move(info), std::move(stream), context, {}});
  for (std::int64_t i = 0; i <= kRunsAtOnce; ++i) {
    cudaEvent_t event = nullptr;
    CF_TRY(from_cuda(cudaEventCreate(&event), "cudaEventCreate"));
    state->events.emplace_back(event);
  }
  return DeviceTimer(std::move(state));
}

const DeviceInfo& DeviceTimer::info() const { return state_->info; }
cuda::Context& DeviceTimer::context() { return state_->context; }

Result<std::vector<double>> DeviceTimer::time_us(const BenchOptions& options, const Enqueue& enqueue) {
  const cudaStream_t stream = state_->stream.get();
  const auto measure = [&](std::vector<double>& series) -> Status {
    for (std::int64_t run = 0; run < options.warmup; ++run) CF_TRY(enqueue());
    for (std::int64_t first = 0; first < options.runs; first += kRunsAtOnce) {
      const std::int64_t count = std::min(kRunsAtOnce, options.runs - first);
      // The device is busy with this run while the host prepares the first run that is timed.
      CF_TRY(enqueue());
      for (std::int64_t i = 0; i <= count; ++i) {
        if (i > 0) CF_TRY(enqueue());
        CF_TRY(from_cuda(cudaEventRecord(state_->events[std::size_t(i)].get(), stream), "cudaEventRecord"));
      }
      CF_TRY(from_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
      for (std::int64_t i = 0; i < count; ++i) {
        float ms = 0;
        CF_TRY(from_cuda(
            cudaEventElapsedTime(&ms, state_->events[std::size_t(i)].get(), state_->events[std::size_t(i) + 1].get()),
            "cudaEventElapsedTime"));
        series.push_back(double(ms) * 1e3);
      }
    }
    return {};
  };
  std::vector<double> series;
  CF_TRY(measure(series));
  return series;
}

Result<std::vector<double>> DeviceTimer::time_graph_us(const BenchOptions& options, const Enqueue& enqueue) {
  const cudaStream_t stream = state_->stream.get();
  CF_TRY_ASSIGN(const cuda::GraphExec graph, cuda::capture(stream, enqueue));
  return time_us(options, [&] { return from_cuda(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch"); });
}

Result<std::vector<double>> DeviceTimer::read_bytes_per_s(const BenchOptions& options) {
  CF_TRY_ASSIGN(const cuda::DeviceMemory block,
                cuda::DeviceMemory::create(state_->context, kProbeBytes + 256, "the streaming read's block"));
  const cudaStream_t stream = state_->stream.get();
  enqueue_random_fill(stream, block.data(), kProbeBytes);
  auto* const sink = reinterpret_cast<unsigned*>(block.data() + kProbeBytes);
  CF_TRY_ASSIGN(std::vector<double> series, time_graph_us(options, [&] {
                  enqueue_stream_read(stream, block.data(), kProbeBytes, sink);
                  return from_cuda(cudaGetLastError(), "streaming read");
                }));
  for (double& value : series) value = double(kProbeBytes) / (value * 1e-6);
  return series;
}

Result<std::vector<double>> DeviceTimer::copy_bytes_per_s(const BenchOptions& options) {
  CF_TRY_ASSIGN(const cuda::DeviceMemory block,
                cuda::DeviceMemory::create(state_->context, kProbeBytes, "the copy's blocks"));
  const cudaStream_t stream = state_->stream.get();
  constexpr std::size_t half = kProbeBytes / 2;
  enqueue_random_fill(stream, block.data(), kProbeBytes);
  CF_TRY_ASSIGN(std::vector<double> series, time_graph_us(options, [&] {
                  enqueue_stream_copy(stream, block.data(), block.data() + half, half);
                  return from_cuda(cudaGetLastError(), "streaming copy");
                }));
  for (double& value : series) value = double(kProbeBytes) / (value * 1e-6);
  return series;
}

}  // namespace cf::apps
