// The threads of ranks that make a call together: each call reaches all, decisions are the first rank's, and a rank that
// ends early lets no other wait for it.
#include <array>
#include <atomic>
#include <numeric>

#include "cuda/serve/rank_threads.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::cuda;

TEST_CASE("Every call reaches every rank once, on a thread of its own that has begun", "[ranks]") {
  for (const int ranks : {1, 2, 4}) {
    std::array<int, 4> begun{}, called{};
    std::array<std::thread::id, 4> threads{};
    std::atomic<int> strayed = 0;  // Catch2 checks on one thread alone
    {
      RankThreads all(ranks, [&](int rank) { begun[std::size_t(rank)] = 1; });
      for (int call = 0; call < 500; ++call)
        all.each([&](int rank) {
          const auto r = std::size_t(rank);
          ++called[r];
          if (call == 0) threads[r] = std::this_thread::get_id();
          strayed += threads[r] != std::this_thread::get_id();
        });
    }
    CHECK(strayed == 0);
    CHECK(threads[0] == std::this_thread::get_id());
    for (std::size_t r = 0; r < 4; ++r) {
      CHECK(called[r] == (int(r) < ranks ? 500 : 0));
      CHECK(begun[r] == (r > 0 && int(r) < ranks));
    }
  }
}

TEST_CASE("All ranks go by what the first one decides, in turn", "[ranks]") {
  constexpr int ranks = 3, decisions = 200;
  Decisions decided;
  std::array<int, ranks> stopped_at{};
  RankThreads all(ranks, [](int) {});
  for (const int stop : {0, 7, decisions - 1}) {
    decided.begin();
    all.each([&](int rank) {
      for (int i = 0; i < decisions; ++i) {
        Status go_on;
        if (rank == 0) {
          if (i == stop) go_on = Status::error(Code::io_error, "enough");
          decided.make(go_on);
        } else {
          go_on = decided.wait(std::size_t(i));
        }
        stopped_at[std::size_t(rank)] = i;
        if (!go_on) break;
      }
      if (rank == 0) decided.end();
    });
    for (int at : stopped_at) CHECK(at == stop);
  }
  decided.begin();
  Status left;
  all.each([&](int rank) {
    if (rank == 0) return decided.end();
    if (rank == 1) left = decided.wait(0);
  });
  CHECK(test::refusal_fault(left, Code::device_error, {"rank 0 has ended its call"}) == "");
}

TEST_CASE("Ranks meet as often as all of them call it, and wait for none that has ended", "[ranks]") {
  constexpr int ranks = 4, meetings = 100;
  Meetings all(ranks);
  RankThreads threads(ranks, [](int) {});
  std::array<int, ranks> came{};
  std::mutex mutex;
  std::atomic<int> faults = 0;
  all.begin();
  threads.each([&](int rank) {
    for (int i = 1; i <= meetings; ++i) {
      {
        const std::lock_guard lock(mutex);
        came[std::size_t(rank)] = i;
      }
      faults += !all.meet(std::size_t(rank));
      const std::lock_guard lock(mutex);
      for (int other : came) faults += other != i && other != i + 1;
    }
    all.end(std::size_t(rank));
  });
  CHECK(faults == 0);
  CHECK(std::accumulate(came.begin(), came.end(), 0) == ranks * meetings);
  all.begin();
  std::array<Status, ranks> met;
  threads.each([&](int rank) {
    if (rank != 2) met[std::size_t(rank)] = all.meet(std::size_t(rank));
    all.end(std::size_t(rank));
  });
  for (int rank : {0, 1, 3})
    CHECK(test::refusal_fault(met[std::size_t(rank)], Code::device_error, {"rank 2 has ended its call"}) == "");
}
