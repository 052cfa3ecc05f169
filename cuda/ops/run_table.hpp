#pragma once
// A step's runs as a kernel has them. Without CUDA's headers.
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "core/host_device.hpp"
#include "core/row_runs.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// The most runs that a launch takes.
inline constexpr int kMaxTableRuns = 256;

/// Runs of a step, in the order of their rows. A kernel takes the table by value, as a parameter of some 3 KB: it lies
/// in constant memory, and no copy to the device precedes the launch.
struct RunTable {
  struct Run {
    std::int32_t first_row, sequence, count;
  };
  std::int32_t runs = 0;
  Run run[kMaxTableRuns] = {};

  CF_HD constexpr int first_row() const { return run[0].first_row; }
  /// The rows from the first run's to the last one's. They are the table's alone where its runs follow each other
  /// without a gap, as those of run_tables() of a whole step do.
  CF_HD constexpr int rows() const { return run[runs - 1].first_row + run[runs - 1].count - first_row(); }
  /// The run of a row: the last one that begins at the row or before it.
  CF_HD constexpr int of_row(int row) const {
    int low = 0;
    for (int left = runs; left > 1;) {
      const int half = left / 2;
      if (run[low + half].first_row <= row) low += half;
      left -= half;
    }
    return low;
  }
};
static_assert(std::is_trivially_copyable_v<RunTable> && sizeof(RunTable) < 3100);

/// Cuts a step's runs into tables, in order; the last one may have fewer than kMaxTableRuns. `runs` may leave out runs
/// of the step: a kernel that takes one run a block needs no others.
inline std::vector<RunTable> run_tables(RowRuns runs) {
  std::vector<RunTable> tables;
  for (const RowRun& r : runs) {
    if (tables.empty() || tables.back().runs == kMaxTableRuns) tables.emplace_back();
    RunTable& table = tables.back();
    table.run[table.runs++] = {std::int32_t(r.first_row), std::int32_t(r.sequence), std::int32_t(r.count)};
  }
  return tables;
}

/// The launches of a call whose kernel takes a table of runs: one for each table, by the same plan.
template <class Plan>
struct TableLaunches {
  Plan plan;
  std::vector<RunTable> tables;
};

template <class Plan>
std::string to_string(const TableLaunches<Plan>& all) {
  std::int64_t runs = 0;
  for (const RunTable& table : all.tables) runs += table.runs;
  return to_string(all.plan) + ", " + plan_text({{runs, "runs"}, {std::int64_t(all.tables.size()), "launches"}});
}

}  // namespace cf::cuda
