// A step's runs: their checks, their rows and how they are divided into groups.
#include <limits>
#include <string>
#include <vector>

#include "core/call_groups.hpp"
#include "core/model/run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

/// The groups of runs in one string: "2+3:1@0" is sequences 2, 3 and 4 with one row each from row 0 on.
std::string groups(const std::vector<Run>& runs) {
  std::string text;
  for (const RunGroup& g : groups_of(runs)) {
    const RowGroup& r = g.rows;
    text += (text.empty() ? "" : " ") + std::to_string(r.sequence) + "+" + std::to_string(r.sequences) + ":" +
            std::to_string(r.count) + "@" + std::to_string(r.first_row);
  }
  return text;
}

}  // namespace

TEST_CASE("Runs that no step can have are refused by name", "[runs]") {
  const auto refused = [](const std::vector<Run>& runs, std::initializer_list<std::string_view> parts) {
    return refusal_fault(check_runs("model", runs, 4, 100, "the capacity"), Code::invalid_argument, parts);
  };
  CHECK(refused({}, {"model: runs: expected at least one, got none"}) == "");
  CHECK(refused({{0, 0, 1}, {4, 0, 1}}, {"runs[1]: expected a sequence of 0 to 3, got 4"}) == "");
  CHECK(refused({{-1, 0, 1}}, {"runs[0]", "got -1"}) == "");
  CHECK(refused({{2, 0, 1}, {1, 5, 1}, {2, 1, 1}}, {"runs[2]: expected one run a sequence, got sequence 2 again"}) ==
        "");
  CHECK(refused({{0, 0, 0}}, {"runs[0]: expected at least one token, got 0"}) == "");
  CHECK(refused({{0, 3, -kHuge}}, {"at least one token"}) == "");
  CHECK(refused({{0, 98, 3}}, {"runs[0]: expected positions of 0 to 99, the capacity, got 3 from 98 on"}) == "");
  CHECK(refused({{0, -1, 1}}, {"got 1 from -1 on"}) == "");
  CHECK(refused({{0, 100, 1}}, {"got 1 from 100 on"}) == "");
  CHECK(refused({{0, 1, kHuge}}, {"positions of 0 to 99"}) == "");
  CHECK(refused({{0, kHuge, kHuge}}, {"positions of 0 to 99"}) == "");
}

TEST_CASE("Runs of any counts and in any order are a step", "[runs]") {
  const std::vector<Run> runs{{3, 99, 1}, {0, 0, 100}, {2, 7, 5}};
  CHECK(check_runs("model", runs, 4, 100));
  CHECK(tokens_of(runs) == 106);
  CHECK(rows_of(runs) == std::vector<RowRun>{{3, 0, 1}, {0, 1, 100}, {2, 101, 5}});
  CHECK(check_row_runs("op", rows_of(runs), 4, 106));
  const std::vector<std::int32_t> positions = positions_of(runs);
  CHECK(positions.size() == 106);
  CHECK(positions[0] == 99);
  CHECK(positions[1] == 0);
  CHECK(positions[100] == 99);
  CHECK(std::vector(positions.end() - 5, positions.end()) == std::vector<std::int32_t>{7, 8, 9, 10, 11});
}

TEST_CASE("Neighbours of one count are one group", "[runs]") {
  CHECK(groups({{5, 9, 300}}) == "5+1:300@0");
  CHECK(groups({{0, 4, 1}, {1, 0, 1}, {2, 8, 1}}) == "0+3:1@0");
  CHECK(groups({{2, 4, 1}, {3, 0, 1}, {4, 8, 5}, {5, 8, 5}}) == "2+2:1@0 4+2:5@2");
  // A gap between the sequences, another count, and sequences that do not ascend each begin a group.
  CHECK(groups({{0, 4, 1}, {2, 0, 1}, {3, 8, 1}}) == "0+1:1@0 2+2:1@1");
  CHECK(groups({{0, 4, 1}, {1, 0, 5}, {2, 0, 1}}) == "0+1:1@0 1+1:5@1 2+1:1@6");
  CHECK(groups({{2, 4, 1}, {1, 0, 1}, {0, 8, 1}}) == "2+1:1@0 1+1:1@1 0+1:1@2");
  CHECK(groups({}) == "");
  CHECK(!differ({}));
  CHECK(!differ(std::vector<RowRun>{{2, 0, 4}, {3, 4, 4}}));
  CHECK(differ(std::vector<RowRun>{{2, 0, 4}, {3, 4, 1}}));
}

TEST_CASE("A group has its runs, and the groups have all of them", "[runs]") {
  const std::vector<Run> runs{{0, 4, 1}, {1, 0, 1}, {2, 8, 5}, {7, 1, 300}, {8, 0, 300}, {3, 3, 1}};
  std::size_t next = 0;
  std::int64_t row = 0;
  for (const RunGroup& g : groups_of(runs)) {
    CHECK(g.runs.data() == runs.data() + next);
    CHECK(std::int64_t(g.runs.size()) == g.rows.sequences);
    CHECK(g.rows.first_row == row);
    for (std::size_t i = 0; i < g.runs.size(); ++i) {
      CHECK(g.runs[i].count == g.rows.count);
      CHECK(g.runs[i].sequence == g.rows.sequence + std::int64_t(i));
    }
    next += g.runs.size();
    row += g.rows.rows();
  }
  CHECK(next == runs.size());
  CHECK(row == tokens_of(runs));
}

TEST_CASE("A table whose rows are not those of a call is refused by name", "[runs]") {
  const auto refused = [](const std::vector<RowRun>& runs, std::initializer_list<std::string_view> parts) {
    return refusal_fault(check_row_runs("attention", runs, 4, 10), Code::invalid_argument, parts);
  };
  CHECK(check_row_runs("attention", std::vector<RowRun>{{1, 0, 3}, {0, 3, 7}}, 4, 10));
  CHECK(refused({}, {"attention: runs: expected at least one, got 0"}) == "");
  CHECK(refused({{4, 0, 10}}, {"runs[0]: expected a sequence of 0 to 3, got 4"}) == "");
  CHECK(refused({{1, 0, 5}, {1, 5, 5}}, {"runs[1]: expected one run a sequence, got 1"}) == "");
  CHECK(refused({{1, 0, 5}, {2, 6, 5}}, {"runs[1]: expected the first row 5, got 6"}) == "");
  CHECK(refused({{1, 1, 5}}, {"runs[0]: expected the first row 0, got 1"}) == "");
  CHECK(refused({{1, 0, 0}}, {"runs[0]: expected 1 to 10 rows, as many as are left, got 0"}) == "");
  CHECK(refused({{1, 0, 9}, {2, 9, 2}}, {"runs[1]: expected 1 to 1 rows"}) == "");
  CHECK(refused({{1, 0, kHuge}}, {"runs[0]: expected 1 to 10 rows"}) == "");
  CHECK(refused({{1, 0, 9}}, {"runs: expected 10 rows in all, got 9"}) == "");
}
