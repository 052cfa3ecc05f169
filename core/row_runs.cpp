#include "core/row_runs.hpp"

#include <algorithm>
#include <set>
#include <string>

namespace cf {

Status check_row_runs(std::string_view owner, RowRuns runs, std::optional<std::int64_t> sequences, std::int64_t rows) {
  const auto refused = [&](const std::string& which, std::string_view expected, std::int64_t got) {
    return Status::error(Code::invalid_argument, std::string(owner) + ": " + which + ": expected " +
                                                     std::string(expected) + ", got " + std::to_string(got));
  };
  if (runs.empty()) return refused("runs", "at least one", 0);
  std::set<std::int64_t> seen;
  std::int64_t next = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& [sequence, first_row, count] = runs[i];
    const std::string which = "runs[" + std::to_string(i) + "]";
    if (sequence < 0 || (sequences && sequence >= *sequences))
      return refused(which, sequences ? "a sequence of 0 to " + std::to_string(*sequences - 1) : "a sequence from 0 on",
                     sequence);
    if (!seen.insert(sequence).second) return refused(which, "one run a sequence", sequence);
    if (first_row != next) return refused(which, "the first row " + std::to_string(next), first_row);
    if (count < 1 || count > rows - next)
      return refused(which, "1 to " + std::to_string(rows - next) + " rows, as many as are left", count);
    next += count;
  }
  if (next != rows) return refused("runs", std::to_string(rows) + " rows in all", next);
  return {};
}

StepRows step_rows(std::int64_t rows, std::int64_t batch, RowRuns runs) {
  if (runs.empty()) return {.batch = batch, .q_len = batch > 0 ? rows / batch : 0};
  StepRows step{.batch = batch, .mixed = rows};
  for (const RowRun& run : runs) step.q_len = std::max(step.q_len, run.count);
  return step;
}

std::vector<RowRun> table_of(RowRuns runs, std::int64_t batch, std::int64_t q_len) {
  if (!runs.empty()) return {runs.begin(), runs.end()};
  std::vector<RowRun> table;
  for (std::int64_t b = 0; b < batch; ++b) table.push_back({.sequence = b, .first_row = b * q_len, .count = q_len});
  return table;
}

std::vector<RowGroup> row_groups(RowRuns runs) {
  std::vector<RowGroup> groups;
  for (const RowRun& run : runs) {
    if (!groups.empty())
      if (RowGroup& last = groups.back(); run.count == last.count && run.sequence == last.sequence + last.sequences) {
        ++last.sequences;
        continue;
      }
    groups.push_back({.sequence = run.sequence, .first_row = run.first_row, .count = run.count});
  }
  return groups;
}

}  // namespace cf
