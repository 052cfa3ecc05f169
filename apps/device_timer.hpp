#pragma once
// Time on a GPU: what the device is, how fast its memory is read, what the work on its stream takes. The header holds
// no CUDA types: without the CUDA backend create() answers that it is missing, and nothing else can be called.
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/timing.hpp"
#include "core/status.hpp"

namespace cf::cuda {
class Context;
}

namespace cf::apps {

/// What must stand beside a figure that a GPU has made.
struct DeviceInfo {
  std::string name;             // "NVIDIA H200"
  std::string driver, runtime;  // "13.0": the newest CUDA that the driver runs, and the CUDA that this program holds
  double memory_clock_mhz = 0, sm_clock_mhz = 0;  // the highest
  std::size_t memory_bytes = 0, l2_bytes = 0;
};

/// Says in a report, a JSON object, which GPU it is of.
template <class Json>
void add_device(Json& report, const DeviceInfo& d) {
  report["gpu"] = d.name;
  report["cuda_driver"] = d.driver;
  report["cuda_runtime"] = d.runtime;
  report["memory_clock_mhz"] = d.memory_clock_mhz;
  report["sm_clock_mhz"] = d.sm_clock_mhz;
}

/// A device with a stream of its own whose work is timed. Not shared between threads.
class DeviceTimer {
 public:
  using Enqueue = std::function<Status()>;

  /// Code::device_error with one line where there is no such device, Code::unimplemented without the CUDA backend.
  static Result<DeviceTimer> create(int device = 0);
  DeviceTimer(DeviceTimer&&) noexcept;
  DeviceTimer& operator=(DeviceTimer&&) noexcept;
  ~DeviceTimer();

  const DeviceInfo& info() const;
  /// What `enqueue` below is to run its ops with.
  cuda::Context& context();

  /// Microseconds of each run: the stream's time between the ends of two successive calls of `enqueue`, which puts work
  /// onto the context's stream and waits for nothing. Runs follow each other without a pause, so that the host's work
  /// counts only where the device waits for it.
  Result<std::vector<double>> time_us(const BenchOptions& options, const Enqueue& enqueue);
  /// The same for replays of a graph: `enqueue` is called once, and its work captured.
  Result<std::vector<double>> time_graph_us(const BenchOptions& options, const Enqueue& enqueue);

  /// Bytes per second of each run of a plain read of kProbeBytes random bytes, 16 at a time: the rate that no kernel
  /// reading memory once can beat by much.
  Result<std::vector<double>> read_bytes_per_s(const BenchOptions& options);
  /// The same for a copy within the device's memory, bytes read and bytes written both counted.
  Result<std::vector<double>> copy_bytes_per_s(const BenchOptions& options);
  static constexpr std::size_t kProbeBytes = std::size_t(1) << 31;  // many times any L2

 private:
  struct State;
  explicit DeviceTimer(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::apps
