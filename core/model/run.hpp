#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/row_runs.hpp"
#include "core/status.hpp"

namespace cf {

/// Consecutive new tokens of one sequence in a step: `count` tokens at the positions from first_position on. A step is
/// a list of runs. A decoding sequence has a run of 1, a prompt one of as many tokens as it brings, drafts that are
/// verified one of their number.
struct Run {
  std::int64_t sequence = 0;        // the slot of the cache that holds it
  std::int64_t first_position = 0;  // of the run's first token
  std::int64_t count = 1;
  bool operator==(const Run&) const = default;
};

/// The tokens of a step.
std::int64_t tokens_of(std::span<const Run> runs);

/// Refuses a list that is empty; a sequence outside 0 .. slots - 1, or one that comes twice; fewer tokens than one in a
/// run; and positions outside 0 .. most - 1. Sequences may come in any order. `limit` says what `most` is, and `owner`
/// begins the message: "model: runs[1]: expected positions of 0 to 2047, the cache's capacity, got 3 from 2046 on".
Status check_runs(std::string_view owner, std::span<const Run> runs, std::int64_t slots, std::int64_t most,
                  std::string_view limit = "the cache's capacity");

/// The step's rows: those of the first run, then those of the second, and so on.
std::vector<RowRun> rows_of(std::span<const Run> runs);

/// The position of every row of a step, in order: first_position + i for row i of a run.
std::vector<std::int32_t> positions_of(std::span<const Run> runs);

/// Runs that a call with one q_len for all takes.
struct RunGroup {
  RowGroup rows;
  std::span<const Run> runs;  // the group's part of the divided list
};

/// Divides a step into groups, as few as its order allows: neighbouring runs of equal count whose sequences follow each
/// other. Runs that are sorted by sequence give the fewest.
std::vector<RunGroup> groups_of(std::span<const Run> runs);

}  // namespace cf
