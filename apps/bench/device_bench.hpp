#pragma once
// Times and checks a model's layers on a GPU. Like device_timer.hpp this header holds no CUDA types.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/bench/device_timer.hpp"
#include "apps/bench/layer_report.hpp"
#include "core/model/config.hpp"
#include "core/status.hpp"
#include "golden/checkpoint/model_source.hpp"

namespace cf::apps {

/// How the GPU is used.
struct DeviceOptions {
  std::string impls;      // a comma list of cuda::Impl's names; empty for graph
  std::string arch_plan;  // "sm_90" or "sm_120": launch plans for that GPU; empty for the device's own
  std::int64_t gpus = 1;  // that share each layer: the first ones
};

/// The device, and the GPU that launches are planned for.
struct DeviceDescription {
  DeviceInfo info;
  std::string launch_plan;
};

/// What is timed: layers one by one, or all of a model's together.
struct DeviceBenchRequest {
  ModelConfig config;                                                 // its dtype is the activations', too
  std::function<Result<checkpoint::LoadedLayer>(std::int64_t)> load;  // called from several threads
  bool whole_model = false;                                           // a step goes through all layers
  std::vector<std::int64_t> first_layers;  // with `whole_model`: steps through so many first layers; empty for all
  std::vector<std::int64_t> kv_lens;       // the largest is the cache's capacity
  std::int64_t batch = 1, q_len = 1;
  std::uint64_t seed = 0;
  BenchOptions bench;
  bool check = false;
  bool ablate = false;  // with `whole_model`: variants of the persistent kernel, too
  DeviceOptions device;
};

/// What DeviceBench::time() hands its results to, as soon as each is there. An error ends the run.
struct DeviceBenchSink {
  std::function<Status(const LayerReport&)> report;
  std::function<Status(const AblationReport&)> ablation;
  /// Takes a configuration's step as a golden file holds it: the layer's inputs and the walk that makes its taps. Empty
  /// where nothing is dumped.
  std::function<Status(const LayerReport&, LayerState& inputs, const SiteWalk&)> dump;
};

/// A model's layers on a GPU. The device, the layers' memory and the executors are made once, for checks and timings
/// alike. Layers have the model's numbers. Of several GPUs the first one's sites and bytes are reported, and the time of a
/// step of all.
class DeviceBench {
 public:
  /// Refuses values that DeviceOptions does not list, and what DeviceTimer::create() refuses.
  static Result<std::unique_ptr<DeviceBench>> create(DeviceBenchRequest request);
  virtual ~DeviceBench() = default;

  virtual const DeviceDescription& device() const = 0;
  /// Refuses what time() would refuse after its first measurement: takes the memory of all resident layers, steps the
  /// layer once with each of the request's implementations, and loads the layers beside it. An error names the
  /// implementation. What is on the device stays there for time().
  virtual Status check(std::int64_t layer) = 0;
  /// Calls sink.report for every kv_len and every implementation. As many layers are resident as make a product's
  /// weights cold: those of the smallest product take twice the L2. With bench.warm one layer is resident. A site's
  /// time is that of a graph that runs the site for every resident layer, divided by their number. The total's time is
  /// that of a step through all resident layers, or through so many first layers as first_layers says, divided by the
  /// step's layers. A step through few layers is cold only as far as their weights exceed the L2. With the request's
  /// `ablate` sink.ablation is called for every kv_len, after sink.report.
  virtual Status time(std::int64_t layer, const DeviceBenchSink& sink) = 0;
};

}  // namespace cf::apps
