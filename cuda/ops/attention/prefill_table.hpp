#pragma once
// The blocks of a prefill attention's launch over runs of different lengths. Without CUDA's headers.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/ops/run_table.hpp"

namespace cf::cuda {

/// The most blocks of a launch along y.
inline constexpr int kMostRowBlocks = 65535;

/// A launch's runs, the longest first, and the blocks of each. A run has `group` rows of a kv head for each of its
/// queries, and a block has block_rows rows of one run. Kernels take the table by value.
struct PrefillTable {
  RunTable runs{};
  std::uint16_t first_block[kMaxTableRuns] = {};  // of a run
  std::int32_t blocks = 0;

  /// The run of a block: the last run whose first block is not behind it.
  CF_HD constexpr int of_block(int block) const {
    int low = 0;
    for (int left = runs.runs; left > 1;) {
      const int half = left / 2;
      if (first_block[low + half] <= block) low += half;
      left -= half;
    }
    return low;
  }
};

/// The blocks of a run.
constexpr std::int64_t row_blocks_of(const RowRun& run, std::int64_t group, int block_rows) {
  return (run.count * group + block_rows - 1) / block_rows;
}

/// Cuts runs into tables, the longest runs first. No run has more than kMostRowBlocks blocks.
inline std::vector<PrefillTable> prefill_tables(RowRuns runs, std::int64_t group, int block_rows) {
  std::vector<RowRun> sorted(runs.begin(), runs.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const RowRun& a, const RowRun& b) { return a.count > b.count; });
  std::vector<PrefillTable> tables;
  for (const RowRun& r : sorted) {
    const auto blocks = std::int32_t(row_blocks_of(r, group, block_rows));
    if (tables.empty() || tables.back().runs.runs == kMaxTableRuns || tables.back().blocks > kMostRowBlocks - blocks)
      tables.emplace_back();
    PrefillTable& t = tables.back();
    t.first_block[t.runs.runs] = std::uint16_t(t.blocks);
    t.runs.run[t.runs.runs++] = {std::int32_t(r.first_row), std::int32_t(r.sequence), std::int32_t(r.count)};
    t.blocks += blocks;
  }
  return tables;
}

}  // namespace cf::cuda
