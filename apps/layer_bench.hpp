#pragma once
// One layer's step on the CPU backend: its inputs made, its sites timed, its result checked and dumped.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/timing.hpp"
#include "core/compare.hpp"
#include "core/contract.hpp"
#include "core/layer.hpp"
#include "core/status.hpp"
#include "golden/golden_file.hpp"

namespace cf::apps {

/// The float backend's activations; weights stay in their stored type.
inline constexpr DType kActivation = DType::f32;

struct LayerTiming {
  std::vector<Timing> sites;
  Timing total;
  std::optional<Timing> stack;           // all of a model's layers back to back
  std::vector<double> read_bytes_per_s;  // a plain read of cold memory, once a run; on the CPU of the layer's matrices
  double best_read() const;              // the 100 % that rates are measured against
  double median_read() const;
  double percent_of_read(const Timing& t) const { return 1e11 * t.gb_per_s() / best_read(); }
};

/// Fills hidden and the old cache entries with procedural activations, rounded to `stored`, and the RoPE table.
void fill_inputs(const ModelConfig& m, const Workload& load, std::uint64_t seed, DType stored, LayerState& state);

/// Times the walk site by site; `step` is called after every run, warm-up included. The state keeps the last run's taps.
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

/// Writes the step as a golden file with the taps of one more run as the variant "cpu_float32". Of `meta` the sources
/// are the caller's; the checksum of the cache is filled in here.
Status dump_layer(const std::string& path, golden::GoldenMeta meta, const std::string& device,
                  const LayerWeights& weights, LayerState& state);

}  // namespace cf::apps
