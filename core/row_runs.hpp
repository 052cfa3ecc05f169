#pragma once
// The rows of a step as an op sees them: which sequence each row belongs to.
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/status.hpp"

namespace cf {

/// The rows [first_row, first_row + count) of an op's tensors: consecutive tokens of one sequence of its cache.
struct RowRun {
  std::int64_t sequence = 0, first_row = 0, count = 1;
  bool operator==(const RowRun&) const = default;
};

/// The table of a step's runs, on the host. Its rows begin at 0 and follow each other without a gap; sequences may come
/// in any order, and each comes at most once. What changes from step to step without the host, lengths and positions,
/// is no part of it.
using RowRuns = std::span<const RowRun>;

/// Refuses a table that is empty; a sequence outside 0 .. sequences - 1, or one that comes twice; fewer rows than one
/// in a run; and rows that do not follow each other or are not `rows` in all. An op without tensors that have a part
/// for each sequence names no number of sequences. `owner` begins the message:
/// "attention: runs[1]: expected a sequence of 0 to 3, got 4".
Status check_row_runs(std::string_view owner, RowRuns runs, std::optional<std::int64_t> sequences, std::int64_t rows);

/// How many rows a step has, as an op's dims() say it: each of `batch` sequences has q_len rows, or, where `mixed` is
/// not 0, each has at most q_len and all have `mixed`.
struct StepRows {
  std::int64_t batch = 0, q_len = 0, mixed = 0;
};
StepRows step_rows(std::int64_t rows, std::int64_t batch, RowRuns runs);

/// The table of a call: `runs`, or where there are none a run of q_len rows for each of `batch` sequences.
std::vector<RowRun> table_of(RowRuns runs, std::int64_t batch, std::int64_t q_len);

/// Runs side by side with the same number of rows, of sequences that follow each other: run i has rows
/// [first_row + i * count, first_row + (i + 1) * count) of sequence `sequence` + i.
struct RowGroup {
  std::int64_t sequence = 0, sequences = 1, first_row = 0, count = 1;
  std::int64_t rows() const { return sequences * count; }
  bool operator==(const RowGroup&) const = default;
};

/// Divides a table into groups, as few as its order allows.
std::vector<RowGroup> row_groups(RowRuns runs);

}  // namespace cf
