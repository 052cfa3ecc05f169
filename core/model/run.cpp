#include "core/model/run.hpp"

#include <string>

namespace cf {

std::int64_t tokens_of(std::span<const Run> runs) {
  std::int64_t tokens = 0;
  for (const Run& run : runs) tokens += run.count;
  return tokens;
}

Status check_runs(std::string_view owner, std::span<const Run> runs, std::int64_t slots, std::int64_t most,
                  std::string_view limit) {
  const auto refused = [&](const std::string& which, const std::string& expected, const std::string& got) {
    return Status::error(Code::invalid_argument,
                         std::string(owner) + ": " + which + ": expected " + expected + ", got " + got);
  };
  if (runs.empty()) return refused("runs", "at least one", "none");
  std::vector<bool> seen(std::size_t(slots < 0 ? 0 : slots));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& [sequence, first, count] = runs[i];
    const std::string which = "runs[" + std::to_string(i) + "]";
    if (sequence < 0 || sequence >= slots)
      return refused(which, "a sequence of 0 to " + std::to_string(slots - 1), std::to_string(sequence));
    if (seen[std::size_t(sequence)])
      return refused(which, "one run a sequence", "sequence " + std::to_string(sequence) + " again");
    seen[std::size_t(sequence)] = true;
    if (count < 1) return refused(which, "at least one token", std::to_string(count));
    // No sum of the two can leave 64 bits.
    if (first < 0 || first >= most || count > most - first)
      return refused(which, "positions of 0 to " + std::to_string(most - 1) + ", " + std::string(limit),
                     std::to_string(count) + " from " + std::to_string(first) + " on");
  }
  return {};
}

std::vector<RowRun> rows_of(std::span<const Run> runs) {
  std::vector<RowRun> rows;
  std::int64_t next = 0;
  for (const Run& run : runs) {
    rows.push_back({.sequence = run.sequence, .first_row = next, .count = run.count});
    next += run.count;
  }
  return rows;
}

std::vector<std::int32_t> positions_of(std::span<const Run> runs) {
  std::vector<std::int32_t> positions;
  for (const Run& run : runs)
    for (std::int64_t i = 0; i < run.count; ++i) positions.push_back(std::int32_t(run.first_position + i));
  return positions;
}

std::vector<RunGroup> groups_of(std::span<const Run> runs) {
  std::vector<RunGroup> groups;
  std::size_t first = 0;
  for (const RowGroup& rows : row_groups(rows_of(runs))) {
    groups.push_back({rows, runs.subspan(first, std::size_t(rows.sequences))});
    first += std::size_t(rows.sequences);
  }
  return groups;
}

}  // namespace cf
