#pragma once
// What cf-layer says: tables for people, JSON and CSV for programs.
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "apps/device_timer.hpp"
#include "apps/layer_bench.hpp"

namespace cf::apps {

/// What holds for all configurations of one call.
struct RunInfo {
  std::string version, commit, command, cpu, backend, model;
  std::string weights;  // "checkpoint DIR" or "procedural weights, seed N"
  std::int64_t threads = 0;
  std::uint64_t seed = 0;
  DType activation = kActivation;
  BenchOptions bench;
  std::optional<DeviceInfo> device;  // of the CUDA backend
  std::string launch_plan;           // whose limits its launches are planned for
};

/// What a configuration on a GPU has beside.
struct DeviceRun {
  std::string impl;                  // how the step was launched
  std::int64_t resident_layers = 0;  // that a site's times are an average over; between two replays the others are read
  std::int64_t step_layers = 0;      // that the total is
};

/// One configuration and what was measured of it.
struct LayerReport {
  std::int64_t layer = 0;
  Workload load;
  DType weights_dtype = DType::f16;
  std::uint64_t weights_checksum = 0;
  LayerTiming timing;
  std::optional<LayerCheck> check;
  std::optional<DeviceRun> device;
};

/// The persistent kernel with one part of its design, or its launches, another way; a layer's time in a stack.
struct VariantReport {
  std::string part, name;
  std::string plan;               // or why there is none
  std::optional<Spread> time_us;  // none where there is no plan
  bool same_bits = false;         // of the stack's output as with the plan's own choice
  double rel_l2 = 0;              // against that
  bool ok = true;                 // the same bits where they must be
};

/// All of them beside each other, measured in turn; the first is the plan's own choice.
struct AblationReport {
  Workload load;
  std::int64_t resident_layers = 0;
  double layer_bytes = 0, read_best_bytes_per_s = 0;
  std::vector<VariantReport> variants;

  double ratio(const VariantReport& v) const { return v.time_us->median / variants.front().time_us->median; }
  double percent_of_read(const VariantReport& v) const {
    return 1e8 * layer_bytes / v.time_us->median / read_best_bytes_per_s;
  }
  bool ok() const;
};

/// The lines above all tables.
void print_header(std::FILE* out, const RunInfo& run);

/// A configuration's heading, its table and the check's verdict.
void print_report(std::FILE* out, const RunInfo& run, const LayerReport& report);

/// A heading and a row a variant.
void print_ablation(std::FILE* out, const AblationReport& report);

/// The run as one object, its configurations as a list of objects in it, their sites and total in those; with ablations
/// a list of these, their variants in them.
std::string report_json(const RunInfo& run, const std::vector<LayerReport>& reports,
                        const std::vector<AblationReport>& ablations = {});

/// A row a site and a total, with the same fields as the JSON, run and configuration repeated in every row.
std::string report_csv(const RunInfo& run, const std::vector<LayerReport>& reports);

}  // namespace cf::apps
