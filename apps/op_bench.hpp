#pragma once
// Single ops of the CUDA backend, timed in a graph on tensors of their own.
#include <cstdint>
#include <string>
#include <vector>

#include "apps/device_timer.hpp"
#include "core/contract.hpp"
#include "core/weights.hpp"

namespace cf::apps {

struct OpBenchOptions {
  BenchOptions bench;
  DType dtype = DType::f16;  // of activations and weights
  WeightFormat linears{};    // of the matrices; a group_size of -1 is one group of all inputs
  std::int64_t layers = 0;   // sets of tensors to rotate over; 0: as many as hold four times the L2, at most kMaxLayers
  bool overlap = false;      // programmatic dependent launch
  static constexpr std::int64_t kMaxLayers = 1024;
};

/// One call of an op, or of all the sites together: a graph's time over its number of layers.
struct OpTiming {
  Timing timing;
  std::int64_t layers = 0;
  bool cold = false;             // one pass over the layers moves four times the L2
  bool limited_by_copy = false;  // it writes a fifth or more of what it moves: the copy rate is its limit, not the read
};

/// The ops that time_op knows: all of ops.def; and those of them that hold a Linear.
std::vector<std::string_view> op_names();
std::vector<std::string_view> linear_op_names();

/// Times an op at the model's shapes: its own example, or for "linear" the layer's four products, each alone, and then
/// together as the site "layer", in a graph with the edges of a layer's graph: each starts early and waits for the
/// products alone that come before it in the layer. A set of procedural tensors a layer; the graph goes through all of
/// them. Only the activations of a Linear are the same in all layers, as in a model, where other kernels have just written
/// them.
Result<std::vector<OpTiming>> time_op(DeviceTimer& timer, std::string_view op, const ModelConfig& model,
                                      const Workload& load, const OpBenchOptions& options);

}  // namespace cf::apps
