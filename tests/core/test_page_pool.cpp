// A pool of pages: random operations against sequences that each keep their entries for themselves.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/model/slot_pages.hpp"
#include "core/page_pool.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Write = PagePool::Write;
using Copy = PagePool::Copy;

/// How a backend can be wrong.
enum class Mutation { none, copies_nothing, stale_table, neighbours_length };

/// The pages' memory as a backend has it, and what each sequence should read there.
struct Memory {
  PagePool pool;
  Mutation mutation = Mutation::none;
  std::vector<std::vector<int>> pages;
  std::vector<std::vector<int>> expected;  // by sequence
  int next = 0;                            // each entry that is written is another number

  Memory(std::int64_t sequences, std::int64_t count, std::int64_t page_entries)
      : pool(sequences, count, page_entries),
        pages(std::size_t(count), std::vector<int>(std::size_t(page_entries), -1)),
        expected(std::size_t(sequences)) {}

  int& at(std::int64_t sequence, std::int64_t entry) {
    const std::int64_t n = pool.page_entries();
    return pages[std::size_t(pool.table(sequence)[std::size_t(entry / n)])][std::size_t(entry % n)];
  }
  /// A step of a backend: it reserves, copies and writes.
  Status write(const std::vector<Write>& writes) {
    const PagePool before = pool;
    CF_TRY_ASSIGN(std::vector<Copy> copies, pool.reserve(writes));
    if (mutation == Mutation::copies_nothing) copies.clear();
    for (const Copy& c : copies)
      for (std::int64_t i = 0; i < c.entries; ++i)
        pages[std::size_t(c.to)][std::size_t(i)] = pages[std::size_t(c.from)][std::size_t(i)];
    for (const auto& [sequence, first, count] : writes) {
      auto& mine = expected[std::size_t(sequence)];
      mine.resize(std::size_t(first));
      for (std::int64_t e = first; e < first + count; ++e) {
        if (pool.references(pool.table(sequence)[std::size_t(e / pool.page_entries())]) != 1)
          return Status::error(Code::device_error, "a page is written that others share");
        mine.push_back(next);
        std::int64_t written = e;
        if (mutation == Mutation::neighbours_length)
          written = std::min(pool.length((sequence + 1) % pool.sequences()), pool.length(sequence) - 1);
        int& to = at(sequence, written);
        if (mutation == Mutation::stale_table &&
            e < before.length(sequence) / pool.page_entries() * pool.page_entries())
          pages[std::size_t(before.table(sequence)[std::size_t(e / pool.page_entries())])]
               [std::size_t(e % pool.page_entries())] = next++;
        else
          to = next++;
      }
    }
    return {};
  }
  /// "" if every sequence reads what it wrote, and every page is owned by those who should have it.
  std::string fault() {
    std::map<std::int32_t, std::int64_t> owners;
    for (std::int64_t s = 0; s < pool.sequences(); ++s) {
      const auto& mine = expected[std::size_t(s)];
      const std::string name = "sequence " + std::to_string(s);
      if (pool.length(s) != std::int64_t(mine.size())) return name + " has another length";
      const std::int64_t n = pool.page_entries(), needed = (pool.length(s) + n - 1) / n;
      if (std::int64_t(pool.table(s).size()) != needed) return name + " has other pages than it needs";
      for (std::int32_t page : pool.table(s)) ++owners[page];
      for (std::size_t e = 0; e < mine.size(); ++e)
        if (at(s, std::int64_t(e)) != mine[e]) return name + " reads another's entry at " + std::to_string(e);
    }
    for (std::int64_t page = 0; page < pool.pages(); ++page)
      if (pool.references(std::int32_t(page)) != owners[std::int32_t(page)])
        return "page " + std::to_string(page) + " has another number of owners";
    std::int64_t unowned = 0;
    for (const auto& [page, n] : owners) unowned += n == 0;
    return pool.free_pages() == unowned ? "" : "a page is lost, or free twice";
  }
};

/// Everything that a pool says.
std::vector<std::vector<std::int32_t>> state_of(const PagePool& pool) {
  std::vector<std::vector<std::int32_t>> state;
  for (std::int64_t s = 0; s < pool.sequences(); ++s) {
    state.emplace_back(pool.table(s).begin(), pool.table(s).end());
    state.back().push_back(std::int32_t(pool.length(s)));
  }
  state.push_back({std::int32_t(pool.free_pages())});
  return state;
}

}  // namespace

TEST_CASE("A sequence gets a page when the one before is full, and gives it back with its last entry", "[pages]") {
  PagePool pool(2, 4, 3);
  const Write two{.sequence = 0, .first = 0, .count = 2}, third{0, 2, 1}, fourth{0, 3, 1};
  REQUIRE(pool.reserve({&two, 1}));
  CHECK(std::vector(pool.table(0).begin(), pool.table(0).end()) == std::vector<std::int32_t>{0});
  REQUIRE(pool.reserve({&third, 1}));
  CHECK(pool.free_pages() == 3);
  REQUIRE(pool.reserve({&fourth, 1}));
  CHECK(pool.free_pages() == 2);
  CHECK(pool.length(0) == 4);
  REQUIRE(pool.truncate(0, 3));
  CHECK(pool.free_pages() == 3);
  pool.release(0);
  CHECK(pool.length(0) == 0);
  CHECK(pool.free_pages() == 4);
}

TEST_CASE("A fork shares pages until one of the two writes", "[pages]") {
  PagePool pool(3, 5, 4);
  const Write first{.sequence = 0, .first = 0, .count = 6};
  REQUIRE(pool.reserve({&first, 1}));
  REQUIRE(pool.fork(0, 1, 6));
  REQUIRE(pool.fork(0, 2, 4));
  CHECK(pool.free_pages() == 3);
  CHECK(pool.references(0) == 3);
  CHECK(pool.references(1) == 2);
  // The page of entries 4 and 5 has two owners: the first that writes gets a copy, the other one keeps it.
  const std::vector<Write> both{{.sequence = 1, .first = 6, .count = 1}, {.sequence = 0, .first = 6, .count = 1}};
  const auto copies = pool.reserve(both);
  REQUIRE(copies);
  CHECK(*copies == std::vector<Copy>{{.from = 1, .to = 2, .entries = 2}});
  // Whoever begins a page behind shared ones needs no copy.
  const Write behind{.sequence = 2, .first = 4, .count = 1};
  const auto none = pool.reserve({&behind, 1});
  REQUIRE(none);
  CHECK(none->empty());
  CHECK(pool.references(0) == 3);
}

TEST_CASE("What a pool refuses changes nothing", "[pages][bad]") {
  PagePool pool(3, 3, 4);
  const Write full{.sequence = 0, .first = 0, .count = 8};
  REQUIRE(pool.reserve({&full, 1}));
  const auto before = state_of(pool);
  const auto refused = [&](const std::vector<Write>& writes, Code code, std::initializer_list<std::string_view> parts) {
    const std::string checked = refusal_fault(pool.check(writes), code, parts);
    return checked.empty() ? refusal_fault(pool.reserve(writes).status(), code, parts) : checked;
  };
  CHECK(refused({{0, 8, 1}, {1, 0, 1}}, Code::out_of_memory,
                {"pages: expected free ones for 2 more entries, got 1 of 3 pages of 4 entries"}) == "");
  CHECK(refused({{1, 0, std::int64_t(1) << 62}}, Code::out_of_memory, {"pages: expected free ones"}) == "");
  CHECK(refused({{3, 0, 1}}, Code::invalid_argument, {"pages: expected a sequence of 0 to 2, got 3"}) == "");
  CHECK(refused({{1, 1, 1}}, Code::invalid_argument, {"sequence 1: expected a first entry of 0 to 0, got 1"}) == "");
  CHECK(refused({{1, 0, 0}}, Code::invalid_argument, {"sequence 1: expected at least one entry, got 0"}) == "");
  CHECK(refused({{1, 0, 1}, {1, 0, 1}}, Code::invalid_argument, {"sequence 1: expected one write a step"}) == "");
  const auto fault = [](const Status& s, std::initializer_list<std::string_view> parts) {
    return refusal_fault(s, Code::invalid_argument, parts);
  };
  CHECK(fault(pool.fork(0, 1, 9), {"sequence 0: expected 0 to 8 entries to share, got 9"}) == "");
  CHECK(fault(pool.fork(1, 0, 0), {"sequence 0: expected one without entries, got 8"}) == "");
  CHECK(fault(pool.fork(0, -1, 0), {"expected a sequence of 0 to 2, got -1"}) == "");
  CHECK(fault(pool.truncate(0, 9), {"sequence 0: expected 0 to 8 entries to keep, got 9"}) == "");
  CHECK(fault(pool.truncate(5, 0), {"expected a sequence of 0 to 2, got 5"}) == "");
  CHECK(state_of(pool) == before);
}

TEST_CASE("Pages that one write gives back serve the next of the same step", "[pages]") {
  PagePool pool(2, 3, 2);
  const Write full{.sequence = 0, .first = 0, .count = 6};
  REQUIRE(pool.reserve({&full, 1}));
  const std::vector<Write> step{{.sequence = 0, .first = 1, .count = 1}, {.sequence = 1, .first = 0, .count = 4}};
  CHECK(pool.check(step));
  CHECK(pool.reserve(step));
  CHECK(pool.free_pages() == 0);
}

namespace {

struct Counts {
  std::int64_t refusals = 0, forks = 0;
};

/// "" if random operations leave every sequence what it wrote, and lose no page; otherwise the first fault.
std::string fault_of_random_operations(Mutation mutation, Counts& counts) {
  std::mt19937 random(7);
  const auto below = [&](std::int64_t n) { return std::int64_t(random() % std::uint64_t(n)); };
  for (int round = 0; round < 200; ++round) {
    const std::int64_t sequences = 1 + below(6);
    Memory m(sequences, 1 + below(24), 1 + below(5));
    m.mutation = mutation;
    for (int operation = 0; operation < 60; ++operation) {
      const std::int64_t s = below(sequences), length = m.pool.length(s);
      auto& mine = m.expected[std::size_t(s)];
      switch (below(8)) {
        case 0: {
          m.pool.release(s);
          mine.clear();
          break;
        }
        case 1: {
          const std::int64_t n = below(length + 1);
          if (!m.pool.truncate(s, n)) return "truncate() refuses";
          mine.resize(std::size_t(n));
          break;
        }
        case 2:
        case 3: {
          const std::int64_t to = below(sequences), n = below(length + 1);
          const auto before = state_of(m.pool);
          const bool fits = m.pool.length(to) == 0;
          if (bool(m.pool.fork(s, to, n)) != fits) return "fork() refuses, or does not";
          if (!fits && state_of(m.pool) != before) return "a refused fork() changes something";
          if (!fits) break;
          const std::vector<int> shared(mine.begin(), mine.begin() + n);
          m.expected[std::size_t(to)] = shared;
          counts.forks += n > 0;
          break;
        }
        default: {
          std::set<std::int64_t> chosen;
          for (std::int64_t i = below(sequences); i >= 0; --i) chosen.insert(below(sequences));
          std::vector<Write> writes;
          std::int64_t needed = 0;  // pages, if no page is given back and every first one is copied
          for (std::int64_t w : chosen) {
            const std::int64_t entries = m.pool.length(w), first = below(3) ? entries : below(entries + 1);
            writes.push_back({.sequence = w, .first = first, .count = 1 + below(below(4) ? 2 : 12)});
            needed += 2 + writes.back().count / m.pool.page_entries();
          }
          const auto before = state_of(m.pool);
          const std::int64_t free = m.pool.free_pages();
          const bool fits = bool(m.pool.check(writes));
          const Status written = m.write(writes);
          if (bool(written) != fits) return "check() and reserve() differ: " + written.message();
          if (fits) break;
          ++counts.refusals;
          if (written.code() != Code::out_of_memory || needed <= free) return written.message();
          if (state_of(m.pool) != before) return "a refused reserve() changes something";
        }
      }
      if (const std::string fault = m.fault(); !fault.empty()) return fault;
    }
  }
  return "";
}

}  // namespace

TEST_CASE("Random operations: every sequence reads what it wrote, and no page is lost", "[pages]") {
  Counts counts;
  CHECK(fault_of_random_operations(Mutation::none, counts) == "");
  CHECK(counts.refusals > 100);
  CHECK(counts.forks > 100);
}

TEST_CASE("The pages of slots: a table for ops, and the cells of it that change", "[pages]") {
  using Cells = std::vector<SlotPages::Cell>;
  SlotPages none(3, 100, {});
  CHECK_FALSE(none);
  CHECK_FALSE(none.table());
  const Run first{.sequence = 1, .count = 5};
  CHECK(none.reserve(std::span(&first, 1))->empty());
  CHECK(none.take_changes().empty());

  SlotPages pages(3, 10, {.pages = 5, .page_entries = 4});
  CHECK(pages.slot_pages() == 3);
  CHECK(pages.table().shape == std::array<std::int64_t, 2>{3, 3});
  CHECK(pages.take_changes().empty());
  REQUIRE(pages.reserve(std::span(&first, 1)));
  CHECK(pages.take_changes() == Cells{{3, 0}, {4, 1}});
  CHECK(pages.take_changes().empty());
  REQUIRE(pages.fork(1, 2, 5));
  CHECK(pages.take_changes() == Cells{{6, 0}, {7, 1}});
  // Slot 2 gets a copy of the page that it writes to.
  const Run second{.sequence = 2, .first_position = 5};
  const auto copies = pages.reserve(std::span(&second, 1));
  REQUIRE(copies);
  CHECK(*copies == std::vector<PagePool::Copy>{{.from = 1, .to = 2, .entries = 1}});
  CHECK(pages.take_changes() == Cells{{7, 2}});
  const Run third{.sequence = 0, .count = 9};
  CHECK(pages.check(std::span(&third, 1)).code() == Code::out_of_memory);
  CHECK(pages.reserve(std::span(&third, 1)).status().code() == Code::out_of_memory);
  CHECK(pages.take_changes().empty());
  pages.truncate(2, 7);  // it has no more
  pages.truncate(2, 4);
  CHECK(pages.take_changes() == Cells{{7, -1}});
  pages.release(1);
  pages.release(2);
  CHECK(pages.free_pages() == 5);
  CHECK(pages.take_changes() == Cells{{3, -1}, {4, -1}, {6, -1}});

  CHECK(SlotPages::check({}, 1 << 20, {}));
  CHECK(SlotPages::check({.pages = 5, .page_entries = 4}, 20, {}));
  const auto refused = [](const PageSizes& pool, std::int64_t capacity, const KeyWindow& stream,
                          std::string_view text) {
    return refusal_fault(SlotPages::check(pool, capacity, stream), Code::invalid_argument, {text});
  };
  CHECK(refused({.pages = 5, .page_entries = 4}, 21, {}, "capacity: expected at most 20 entries") == "");
  CHECK(refused({.pages = -1, .page_entries = 4}, 1, {}, "pages must be 1 to 2147483647, got -1") == "");
  CHECK(refused({.pages = 5, .page_entries = 0}, 1, {}, "page_entries must be 1 to 2147483647, got 0") == "");
  CHECK(refused({.pages = 5, .page_entries = 4}, 1, {.keys = 8}, "pages: expected none for streams, got 5") == "");
}

TEST_CASE("A backend that copies nothing, writes by an old table or by a neighbour's length is found out", "[pages]") {
  for (Mutation mutation : {Mutation::copies_nothing, Mutation::stale_table, Mutation::neighbours_length}) {
    Counts counts;
    CHECK(fault_of_random_operations(mutation, counts).find("reads another's entry") != std::string::npos);
  }
}
