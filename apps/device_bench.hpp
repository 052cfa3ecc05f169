#pragma once
// A model's layers timed and checked on a GPU. Holds no CUDA types, as device_timer.hpp.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/device_timer.hpp"
#include "apps/layer_report.hpp"
#include "core/model_config.hpp"
#include "core/status.hpp"
#include "golden/golden_file.hpp"

namespace cf::apps {

/// How the GPU is used.
struct DeviceOptions {
  std::string impls;      // a comma list of cuda::Impl's names; empty for graph
  std::string arch_plan;  // "sm_90" or "sm_120": that GPU's launch plans; empty for the device's own
};

/// The device and what it is used with, as reports name them.
struct DeviceDescription {
  DeviceInfo info;
  std::string launch_plan;  // whose limits launch plans are made from
};

/// Refuses options that are none, and as DeviceTimer::create() does.
Result<DeviceDescription> describe_device(const DeviceOptions& options);

/// One layer, or all of a model's.
struct DeviceBenchRequest {
  ModelConfig config;                                               // its dtype is the activations', too
  std::function<Result<golden::GoldenWeights>(std::int64_t)> load;  // layer by layer; called from several threads
  std::int64_t layer = 0;                                           // ignored with `stack`
  bool stack = false;                                               // time all layers back to back
  std::vector<std::int64_t> stack_layers;  // with `stack`: so many of them, each in turn; or all
  std::vector<std::int64_t> seq_lens;      // the largest is the cache's capacity
  std::int64_t batch = 1;
  std::uint64_t seed = 0;
  BenchOptions bench;
  bool check = false;
  bool ablate = false;  // with `stack`: the persistent kernel's parts, too
  DeviceOptions device;
};

/// Calls `report` for every seq_len and every impl in it. So many layers are resident that one product's weights are long
/// out of the L2 when they are read again (bench.warm: the one layer alone). A site's time is that of a graph which holds
/// it for every resident layer, a layer's that of a step through all of them or the first of stack_layers, each divided by
/// their number. A step through few layers is cold only as far as their weights are larger than the L2. With
/// request.ablate `ablation` is called for every seq_len, after `report`.
Status bench_on_device(const DeviceBenchRequest& request, const std::function<void(const LayerReport&)>& report,
                       const std::function<void(const AblationReport&)>& ablation);

}  // namespace cf::apps
