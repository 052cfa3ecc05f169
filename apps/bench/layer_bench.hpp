#pragma once
// Times one layer's step on the CPU backend, and checks and dumps the step of any backend.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/bench/timing.hpp"
#include "apps/verify/golden_walk.hpp"
#include "core/compare.hpp"
#include "core/contract.hpp"
#include "core/model/layer.hpp"
#include "core/status.hpp"
#include "golden/file/golden_file.hpp"

namespace cf::apps {

/// The dtype of the CPU backend's activations. Weights stay in their stored dtype.
inline constexpr DType kActivation = DType::f32;

struct LayerTiming {
  std::vector<Timing> sites;
  Timing total;                // of one layer
  std::optional<Timing> step;  // of a step through many layers, where that was timed
  /// The rate of a streaming read in each run. The read is cold; on the CPU it is that of the layer's matrices.
  std::vector<double> read_bytes_per_s;
  double best_read() const;  // shares of the read are shares of this rate
  double median_read() const;
  double percent_of_read(const Timing& t) const { return 1e11 * t.gb_per_s() / best_read(); }
};

/// Fills hidden and the old cache entries with procedural activations, rounded to `stored`, and the RoPE table.
void fill_inputs(const ModelConfig& m, const Workload& load, std::uint64_t seed, DType stored, LayerState& state);

/// The bytes of an op's input and output activations.
template <class Args>
double activation_bytes(const Args& args) {
  double bytes = 0;
  Args::Op::tensors(Args::Op::dims(args), args, [&](const TensorSpec& t, const auto& view, const auto&) {
    if (view.data && (is_read(t.role) || t.role == Role::output)) bytes += double(view.bytes());
  });
  return bytes;
}

/// A layer's own bytes: the sum of its sites' own bytes.
double own_bytes_of(const std::vector<Timing>& sites);

/// Times the walk site by site. `step` is called after every run, warm-up included. The state keeps the last run's
/// taps.
Result<LayerTiming> time_layer(const ModelConfig& m, const LayerWeights& weights, LayerState& state,
                               const BenchOptions& options, const std::function<void()>& step);

/// The layer's output against the double oracle on the same inputs, and the budget derived for it.
struct LayerCheck {
  Comparison error;
  Budget budget;
  bool ok() const { return error.within(budget); }
};

/// Checks the output of a backend of that precision against the oracle run on `inputs`, an f64 state with the same
/// inputs.
Result<LayerCheck> check_layer(const ModelConfig& m, const LayerWeights& weights, const Tensor& output,
                               Precision precision, LayerState& inputs);

/// Adds a site's output, which lies in host memory, to a golden file.
using AddTap = std::function<Status(const SiteOutput&)>;
/// Runs a layer's sites and hands every output to an AddTap, in the walk's order.
using SiteWalk = std::function<Status(const AddTap&)>;

/// The CPU backend's walk over the state, for dump_layer().
SiteWalk cpu_walk(const ModelConfig& m, const LayerWeights& weights, LayerState& state);

/// Writes a step as a golden file: the procedural inputs of `inputs`, which fill_inputs() has filled, and the taps of
/// `walk` as one variant. The caller fills `meta`, but for the checksum of the cache. variant.taps is not read.
Status dump_layer(const std::string& path, golden::GoldenMeta meta, const golden::VariantInfo& variant,
                  LayerState& inputs, const SiteWalk& walk);

}  // namespace cf::apps
