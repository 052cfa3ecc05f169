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

/// The lines above all tables.
void print_header(std::FILE* out, const RunInfo& run);

/// A configuration's heading, its table and the check's verdict.
void print_report(std::FILE* out, const RunInfo& run, const LayerReport& report);

/// The run as one object, its configurations as a list of objects in it, their sites and total in those.
std::string report_json(const RunInfo& run, const std::vector<LayerReport>& reports);

/// A row a site and a total, with the same fields as the JSON, run and configuration repeated in every row.
std::string report_csv(const RunInfo& run, const std::vector<LayerReport>& reports);

}  // namespace cf::apps
