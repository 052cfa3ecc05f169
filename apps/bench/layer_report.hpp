#pragma once
// cf-layer's report: tables for people, JSON and CSV for programs.
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "apps/bench/device_timer.hpp"
#include "apps/bench/layer_bench.hpp"

namespace cf::apps {

/// What all configurations of one call have in common.
struct RunInfo {
  std::string version, commit, command, cpu, backend, model;
  std::string weights;  // "checkpoint DIR" or "procedural weights, seed N"
  std::int64_t threads = 0;
  std::uint64_t seed = 0;
  DType activation = kActivation;
  BenchOptions bench;
  std::optional<DeviceInfo> device;  // with the CUDA backend
  std::string launch_plan;           // the GPU that its launches are planned for
};

/// How a configuration was run on a GPU.
struct DeviceRun {
  std::string impl;                  // how the step was launched
  std::int64_t resident_layers = 0;  // that one run of a site goes through
  std::int64_t step_layers = 0;      // that one step goes through
  Spread host_us = {};               // the host's time to put one step onto an idle stream
};

/// One configuration and its measurements.
struct LayerReport {
  std::int64_t layer = 0;
  Workload load;
  DType weights_dtype = DType::f16;
  std::uint64_t weights_checksum = 0;
  LayerTiming timing;
  std::optional<LayerCheck> check;
  std::optional<DeviceRun> device;
};

/// The persistent kernel with one part of its plan, or its launches, changed.
struct VariantReport {
  std::string part, name;
  std::string plan;               // or why there is none
  std::optional<Spread> time_us;  // of a layer in a step through all layers; none without a plan
  bool same_bits = false;         // whether the output has the bits of the first variant's
  double rel_l2 = 0;              // of the output, against the first variant's
  bool ok = true;                 // false where the output must have the same bits and has others
};

/// The variants, timed in turn. The first is the plan without a change.
struct AblationReport {
  Workload load;
  std::int64_t resident_layers = 0;
  double layer_bytes = 0, layer_own_bytes = 0, read_best_bytes_per_s = 0;
  std::vector<VariantReport> variants;

  double ratio(const VariantReport& v) const { return v.time_us->median / variants.front().time_us->median; }
  double percent_of_read(const VariantReport& v) const {
    return 1e8 * layer_bytes / v.time_us->median / read_best_bytes_per_s;
  }
  bool ok() const;
};

/// The lines above all tables.
void print_header(std::FILE* out, const RunInfo& run);

/// A configuration's heading, its table and the check's result.
void print_report(std::FILE* out, const RunInfo& run, const LayerReport& report);

/// A heading, and a table with a row for each variant.
void print_ablation(std::FILE* out, const RunInfo& run, const AblationReport& report);

/// The run as one object. "configurations" lists the reports, each with its "sites", "total" and, for a step through
/// many layers, "step". "ablations" lists the ablations, each with its "variants". "complete" is false while there are
/// configurations to come.
std::string report_json(const RunInfo& run, const std::vector<LayerReport>& reports,
                        const std::vector<AblationReport>& ablations, bool complete);

/// A row for each site and total, with the fields of the JSON. Each row repeats those of the run and the configuration.
std::string report_csv(const RunInfo& run, const std::vector<LayerReport>& reports);

}  // namespace cf::apps
