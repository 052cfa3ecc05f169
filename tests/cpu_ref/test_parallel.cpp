// Parallel work that fails or is ended early, and the threads that do it.
#include "cpu_ref/ops/parallel.hpp"

#include <omp.h>

#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_ref/cpu_ref.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::cpu_ref;
using namespace cf::test;

TEST_CASE("parallel work does each part once, with a scratch for each thread", "[parallel]") {
  for (const std::int64_t n : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<std::size_t>(n));
    std::atomic<int> scratches = 0;
    REQUIRE(parallel_for(
        n, [&] { return scratches++; }, [&](int, std::int64_t i) { ++done[std::size_t(i)]; }));
    CHECK(std::all_of(done.begin(), done.end(), [](int count) { return count == 1; }));
    CHECK(scratches <= omp_get_max_threads());
  }
}

TEST_CASE("no memory in parallel work is a Status, wherever it lacks", "[parallel]") {
  // Thrown here: AddressSanitizer ends the process where a vector asks for too much.
  const auto no_memory = []() -> std::vector<double> { throw std::bad_alloc(); };
  std::atomic<int> later = 0;
  CHECK(refusal_fault(parallel_for(100, no_memory, [&](auto&, std::int64_t) { ++later; }), Code::out_of_memory,
                      {"out of memory"}) == "");
  CHECK(refusal_fault(parallel_for(100, [&](std::int64_t i) { i == 57 ? void(no_memory()) : void(); }),
                      Code::out_of_memory, {"out of memory"}) == "");
  CHECK(later < omp_get_max_threads());  // another thread may have had its scratch before the first failed
  CHECK(refusal_fault(parallel_for(9, [](std::int64_t) { throw std::length_error("too long"); }),
                      Code::invalid_argument, {"too long"}) == "");
  CHECK(parallel_for(100, [](std::int64_t) {}));
}

TEST_CASE("a check ends parallel work between its parts, on the thread that began it", "[parallel]") {
  const int caller = omp_get_thread_num();
  int asked = 0;
  bool elsewhere = false;
  const std::function<Status()> check = [&]() -> Status {
    elsewhere = elsewhere || omp_get_thread_num() != caller;
    return ++asked < 2 ? Status() : Status::error(Code::io_error, "enough");
  };
  std::atomic<std::int64_t> done = 0;
  // A hundred checks a second, and parts of a millisecond: without an end all would last more than three seconds on
  // each of so many threads.
  const std::int64_t parts = 3000 * omp_get_max_threads();
  const auto part = [&](std::int64_t) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    while (std::chrono::steady_clock::now() < end) {
    }
    ++done;
  };
  {
    const Checks checks(check);
    CHECK(refusal_fault(parallel_for(parts, part), Code::io_error, {"enough"}) == "");
  }
  CHECK(asked == 2);
  CHECK_FALSE(elsewhere);
  CHECK(done < parts);
  CHECK(parallel_for(10, part));
  CHECK(asked == 2);
}

TEST_CASE("threads are started with stacks that ops can use", "[parallel]") {
  const int before = omp_get_max_threads();
  REQUIRE(start_threads("threads", 3));
  CHECK(omp_get_max_threads() == 3);
  CHECK(refusal_fault(start_threads("OMP_NUM_THREADS", 10000), Code::invalid_argument,
                      {"OMP_NUM_THREADS: expected 1 to 1024, got 10000"}) == "");
  omp_set_num_threads(before);
}
