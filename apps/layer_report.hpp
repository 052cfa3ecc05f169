#pragma once
// What cf-layer says: tables for people, JSON and CSV for programs.
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "apps/layer_bench.hpp"

namespace cf::apps {

/// What holds for all configurations of one call.
struct RunInfo {
  std::string version, commit, command, cpu, backend, model;
  std::string weights;  // "checkpoint DIR" or "procedural weights, seed N"
  std::int64_t threads = 0;
  std::uint64_t seed = 0;
  BenchOptions bench;
};

/// One configuration and what was measured of it.
struct LayerReport {
  std::int64_t layer = 0;
  Workload load;
  DType weights_dtype = DType::f16;
  std::uint64_t weights_checksum = 0;
  LayerTiming timing;
  std::optional<LayerCheck> check;
};

/// The lines above all tables.
void print_header(std::FILE* out, const RunInfo& run);

/// A configuration's heading, its table and the check's verdict.
void print_report(std::FILE* out, const LayerReport& report);

/// The run as one object, its configurations as a list of objects in it, their sites and total in those.
std::string report_json(const RunInfo& run, const std::vector<LayerReport>& reports);

/// A row a site and a total, with the same fields as the JSON, run and configuration repeated in every row.
std::string report_csv(const RunInfo& run, const std::vector<LayerReport>& reports);

}  // namespace cf::apps
