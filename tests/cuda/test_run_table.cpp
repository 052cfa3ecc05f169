// How a step's runs are cut into tables, and how a kernel finds a row's run in one.
#include <algorithm>
#include <random>
#include <vector>

#include "cuda/ops/attention/prefill_table.hpp"
#include "cuda/ops/run_table.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::cuda;

namespace {

/// `n` runs of 1 to `most` rows, of sequences in descending order.
std::vector<RowRun> some_runs(std::int64_t n, std::int64_t most) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::vector<RowRun> runs;
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t count = 1 + std::int64_t(random() % unsigned(most));
    runs.push_back({.sequence = n - i, .first_row = row, .count = count});
    row += count;
  }
  return runs;
}

}  // namespace

TEST_CASE("Tables have all runs of a step in order, 256 each and the rest in the last", "[runs]") {
  for (std::int64_t n : {1, 2, 3, 255, 256, 257, 300, 512, 513, 1024})
    for (std::int64_t most : {1, 300}) {
      const std::vector<RowRun> runs = some_runs(n, most);
      const std::vector<RunTable> tables = run_tables(runs);
      REQUIRE(std::int64_t(tables.size()) == (n + 255) / 256);
      std::size_t next = 0;
      int row = 0;
      for (const RunTable& table : tables) {
        CHECK(table.first_row() == row);
        for (int i = 0; i < table.runs; ++i, ++next) {
          const auto& [first_row, sequence, count] = table.run[i];
          CHECK(runs[next] == RowRun{.sequence = sequence, .first_row = first_row, .count = count});
        }
        CHECK((table.runs == kMaxTableRuns || &table == &tables.back()));
        row += table.rows();
      }
      CHECK(next == runs.size());
      CHECK(row == runs.back().first_row + runs.back().count);
    }
  CHECK(run_tables({}).empty());
}

TEST_CASE("Each row is found in its run", "[runs]") {
  for (std::int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 100, 255, 256})
    for (std::int64_t most : {1, 2, 65}) {
      const RunTable table = run_tables(some_runs(n, most)).front();
      int wrong = 0;
      for (int i = 0; i < table.runs; ++i)
        for (int row = table.run[i].first_row; row < table.run[i].first_row + table.run[i].count; ++row)
          wrong += table.of_row(row) != i;
      CHECK(wrong == 0);
    }
  // A table that begins in the middle of a step, and one of runs that are not side by side.
  const std::vector<RowRun> step = some_runs(300, 5);
  const RunTable last = run_tables(step).back();
  for (int i = 0; i < last.runs; ++i) CHECK(last.of_row(last.run[i].first_row) == i);
  const RunTable chosen = run_tables(std::vector<RowRun>{step[3], step[9], step[200]}).front();
  CHECK(chosen.of_row(int(step[9].first_row + step[9].count) - 1) == 1);
  CHECK(chosen.of_row(int(step[200].first_row)) == 2);
}

TEST_CASE("A prefill's blocks have every row of every run once, and find their runs", "[runs]") {
  for (std::int64_t n : {1, 2, 255, 256, 257, 600})
    for (std::int64_t most : {1, 65, 300})
      for (std::int64_t group : {1, 7})
        for (int block_rows : {64, 128}) {
          const std::vector<RowRun> runs = some_runs(n, most);
          const std::vector<PrefillTable> tables = prefill_tables(runs, group, block_rows);
          REQUIRE(std::int64_t(tables.size()) == (n + 255) / 256);
          std::vector<std::int64_t> rows(std::size_t(runs.back().first_row + runs.back().count));
          std::int32_t last_count = INT32_MAX;
          for (const PrefillTable& t : tables) {
            int wrong = 0, first = 0;
            for (int i = 0; i < t.runs.runs; ++i) {
              const auto& run = t.runs.run[i];
              wrong += run.count > last_count;  // the longest come first
              last_count = run.count;
              const int blocks = int((run.count * group + block_rows - 1) / block_rows);
              wrong += t.first_block[i] != first;
              for (int b = first; b < first + blocks; ++b) wrong += t.of_block(b) != i;
              first += blocks;
              for (int row = run.first_row; row < run.first_row + run.count; ++row) ++rows[std::size_t(row)];
            }
            CHECK(wrong == 0);
            CHECK(t.blocks == first);
          }
          CHECK(std::all_of(rows.begin(), rows.end(), [](std::int64_t times) { return times == 1; }));
        }
  // No launch has more blocks than a grid.
  const std::vector<RowRun> long_runs{{0, 0, 3000000}, {1, 3000000, 2000000}, {2, 5000000, 1000000}};
  const std::vector<PrefillTable> tables = prefill_tables(long_runs, 1, 64);
  REQUIRE(tables.size() == 2);
  CHECK((tables[0].runs.runs == 1 && tables[0].blocks == 46875));
  CHECK((tables[1].runs.runs == 2 && tables[1].blocks == 46875));
}
