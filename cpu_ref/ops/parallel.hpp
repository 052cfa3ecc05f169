#pragma once
// Work that is divided among OpenMP's threads. No exception may leave a parallel region, and a long one must be able to
// end early: this is the one place for both. Private to cpu_ref.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "core/status.hpp"

namespace cf::cpu_ref {

/// While one lives, parallel work that this thread begins calls `check` a hundred times a second between its parts, on
/// this thread. The first Status that is not ok ends the work. An empty function checks nothing.
class Checks {
 public:
  explicit Checks(const std::function<Status()>& check) : check_(check), before_(std::exchange(current(), this)) {}
  Checks(const Checks&) = delete;
  Checks& operator=(const Checks&) = delete;
  ~Checks() { current() = before_; }

  static Status ask() {
    Checks* const checks = current();
    if (!checks || !checks->check_) return {};
    const Clock::time_point now = Clock::now();
    if (now < checks->next_) return {};
    checks->next_ = now + std::chrono::milliseconds(10);
    return checks->check_();
  }

 private:
  using Clock = std::chrono::steady_clock;
  /// Null on OpenMP's own threads.
  static Checks*& current() {
    static thread_local Checks* checks = nullptr;
    return checks;
  }
  const std::function<Status()>& check_;
  Checks* before_;
  Clock::time_point next_{};
};

/// The first failure in a parallel region. Nothing runs after it.
class Failure {
 public:
  template <class F>
  void guard(F&& f) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      if (Status status = Checks::ask(); !status) return fail(std::move(status));
      f();
    } catch (const std::bad_alloc&) {
      fail(Status::error(Code::out_of_memory, "out of memory"));
    } catch (const std::exception& e) {
      fail(Status::error(Code::invalid_argument, e.what()));
    }
  }
  /// Behind the region.
  Status status() const { return status_; }

 private:
  void fail(Status status) {
    const std::lock_guard lock(mutex_);
    if (!failed_.exchange(true)) status_ = std::move(status);
  }
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  Status status_;
};

/// Calls f(scratch, i) for i from 0 to n - 1. Each thread has a scratch of its own, which make() returns, and a
/// contiguous share of the numbers.
template <class Make, class F>
Status parallel_for(std::int64_t n, Make&& make, F&& f) {
  Failure failure;
#pragma omp parallel if (n > 1)
  {
    std::optional<decltype(make())> scratch;
    failure.guard([&] { scratch.emplace(make()); });
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < n; ++i) failure.guard([&] { f(*scratch, i); });
  }
  return failure.status();
}

/// Calls f(i).
template <class F>
Status parallel_for(std::int64_t n, F&& f) {
  return parallel_for(
      n, [] { return 0; }, [&](int, std::int64_t i) { f(i); });
}

}  // namespace cf::cpu_ref
