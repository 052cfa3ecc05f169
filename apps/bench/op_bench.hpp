#pragma once
// Times single ops of the CUDA backend in a CUDA graph. Like device_timer.hpp this header holds no CUDA types.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/bench/device_timer.hpp"
#include "core/contract.hpp"
#include "core/model/config.hpp"
#include "core/model/workload.hpp"
#include "core/weights.hpp"

namespace cf::apps {

/// An op, and what it is timed with.
struct OpBenchRequest {
  std::string op;  // one of op_names()
  ModelConfig model;
  std::vector<Workload> loads;  // each is timed in turn
  BenchOptions bench;
  DType dtype = DType::f16;  // of activations and weights
  WeightFormat linears{};    // of the matrices; a group_size of -1 is one group of all inputs
  std::int64_t layers = 0;   // sets of tensors; 0 for as many as hold four times the L2, at most kMaxLayers
  bool overlap = false;      // programmatic dependent launch
  static constexpr std::int64_t kMaxLayers = 1024;
};

/// The time of one call of an op, or of one call at each of several sites: a graph's time divided by its layers.
struct OpTiming {
  Timing timing;
  std::int64_t layers = 0;        // sets of tensors that the graph goes through
  bool cold = false;              // one pass over the layers moves four times the L2
  bool roofline_is_copy = false;  // a fifth of its bytes or more are written: the copy's rate is its roofline
};

/// An op whose arguments hold a Linear.
template <class Op>
concept HoldsLinear = requires(typename Op::Args args) {
  args.linear;
};

/// The names of all ops of ops.def, fused.def, port.def and ranks.def, and of those among them that hold a Linear.
std::vector<std::string_view> op_names();
std::vector<std::string_view> linear_op_names();

/// The rates of the GPU's memory, one for each run. The best read and the best copy are the rooflines.
struct MemoryRates {
  std::vector<double> read_bytes_per_s, copy_bytes_per_s;
};

/// What bench_ops() hands its results to, as soon as they are there.
struct OpBenchSink {
  std::function<void(const DeviceInfo&, const MemoryRates&)> device;                      // once, before any timing
  std::function<Status(const Workload& load, const std::vector<OpTiming>& sites)> timed;  // an error ends the run
};

/// Times an op at a model's shapes, on procedural tensors. The op "linear" is the layer's four products: each is timed
/// alone, then all four as the site "layer", in a graph in which each starts early and waits only for the products
/// before it in the layer. Any other op is timed at the shapes of its contract's example(). A fused op
/// runs where it has a kernel for the model, which most have for quantised matrices alone. The graph goes through
/// `request.layers` sets of tensors. Those of a Linear share their activations, which in a model other kernels would
/// have just written.
Status bench_ops(const OpBenchRequest& request, const OpBenchSink& sink);

}  // namespace cf::apps
