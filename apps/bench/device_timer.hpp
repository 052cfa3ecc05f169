#pragma once
// Times work on a GPU, and its memory's rates. The header holds no CUDA types, so that it compiles without CUDA: there
// DeviceTimer::create() returns an error.
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/bench/timing.hpp"
#include "core/status.hpp"

namespace cf::cuda {
class Context;
}

namespace cf::apps {

/// The GPU, as every report names it.
struct DeviceInfo {
  std::string name;             // "NVIDIA H200"
  std::string driver, runtime;  // "13.0": the newest CUDA that the driver runs, and the CUDA that this program links
  double memory_clock_mhz = 0, sm_clock_mhz = 0;  // the highest clocks
  std::size_t memory_bytes = 0, l2_bytes = 0;
};

/// Adds the GPU to a report, a JSON object.
template <class Json>
void add_device(Json& report, const DeviceInfo& d) {
  report["gpu"] = d.name;
  report["cuda_driver"] = d.driver;
  report["cuda_runtime"] = d.runtime;
  report["memory_clock_mhz"] = d.memory_clock_mhz;
  report["sm_clock_mhz"] = d.sm_clock_mhz;
}

/// A device with a stream whose work it times. Not shared between threads.
class DeviceTimer {
 public:
  using Enqueue = std::function<Status()>;

  /// Code::device_error with one line where there is no such device, Code::unimplemented without the CUDA backend.
  static Result<DeviceTimer> create(int device = 0);
  DeviceTimer(DeviceTimer&&) noexcept;
  DeviceTimer& operator=(DeviceTimer&&) noexcept;
  ~DeviceTimer();

  const DeviceInfo& info() const;
  /// The context of the stream, for the ops that `enqueue` below runs.
  cuda::Context& context();

  /// Microseconds of each run. A run is one call of `enqueue`, which puts work onto the context's stream and waits for
  /// nothing; its time is the stream's, from the end of the run before to its own end. Runs follow each other without a
  /// pause: the host's work counts only where the device waits for it.
  Result<std::vector<double>> time_us(const BenchOptions& options, const Enqueue& enqueue);
  /// The same for replays of a CUDA graph, into which one call of `enqueue` is captured.
  Result<std::vector<double>> time_graph_us(const BenchOptions& options, const Enqueue& enqueue);

  /// Bytes per second of each run of a kernel that reads kProbeBytes random bytes once, 16 a load: the roofline of
  /// kernels that read memory once.
  Result<std::vector<double>> read_bytes_per_s(const BenchOptions& options);
  /// The same for a kernel that copies half of kProbeBytes to the other half, bytes read and bytes written both
  /// counted.
  Result<std::vector<double>> copy_bytes_per_s(const BenchOptions& options);
  static constexpr std::size_t kProbeBytes = std::size_t(1) << 31;  // many times the size of any L2

 private:
  struct State;
  explicit DeviceTimer(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::apps
