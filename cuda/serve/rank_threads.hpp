#pragma once
// How the threads of ranks that share a model make a call together. Without CUDA. Private to cuda/serve.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/status.hpp"

namespace cf::cuda {

/// A thread for each rank but the first, whose work the caller's thread does.
class RankThreads {
 public:
  using Work = std::function<void(int rank)>;

  /// Each thread begins with begin(rank).
  RankThreads(int ranks, Work begin) : begin_(std::move(begin)) {
    for (int rank = 1; rank < ranks; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  }
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;
  ~RankThreads() {
    each({});
    for (std::thread& t : threads_) t.join();
  }

  /// Runs work(rank) for all ranks at the same time, and waits for all. An empty work ends the threads.
  void each(const Work& work) {
    work_ = &work;
    running_.store(int(threads_.size()));
    number_.fetch_add(1);
    number_.notify_all();
    if (work) work(0);
    for (int left = running_.load(); left > 0; left = running_.load()) running_.wait(left);
  }

 private:
  void serve(int rank) {
    begin_(rank);
    for (unsigned seen = 0;; ++seen) {
      number_.wait(seen);
      const Work& work = *work_;
      const bool ends = !work;
      if (!ends) work(rank);
      if (running_.fetch_sub(1) == 1) running_.notify_one();
      if (ends) return;
    }
  }

  Work begin_;
  const Work* work_ = nullptr;
  std::atomic<unsigned> number_ = 0;  // of the work that is asked for
  std::atomic<int> running_ = 0;      // threads that have not done it
  std::vector<std::thread> threads_;
};

/// What rank 0 decides in a call, in turn, for all ranks.
class Decisions {
 public:
  void begin() {
    const std::lock_guard lock(mutex_);
    made_.clear();
    ended_ = false;
  }
  void make(Status decision) {
    const std::lock_guard lock(mutex_);
    made_.push_back(std::move(decision));
    changed_.notify_all();
  }
  /// Rank 0's call has returned: it decides no more.
  void end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  Status wait(std::size_t which) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || made_.size() > which; });
    if (made_.size() > which) return made_[which];
    return Status::error(Code::device_error, "model: rank 0 has ended its call");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Status> made_;
  bool ended_ = false;
};

/// Where the threads of a call wait for each other.
class Meetings {
 public:
  explicit Meetings(std::size_t ranks) : calls_(ranks, 0), ended_(ranks, false) {}
  void begin() {
    const std::lock_guard lock(mutex_);
    std::ranges::fill(calls_, 0);
    std::fill(ended_.begin(), ended_.end(), false);
  }
  /// A rank's call has returned: it meets no one any more.
  void end(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    ended_[rank] = true;
    changed_.notify_all();
  }
  /// Waits until all have called this as often as this rank.
  Status meet(std::size_t rank) {
    std::unique_lock lock(mutex_);
    const std::size_t number = ++calls_[rank];
    changed_.notify_all();
    const auto has_come = [&](std::size_t r) { return calls_[r] >= number; };
    changed_.wait(lock, [&] {
      for (std::size_t r = 0; r < calls_.size(); ++r)
        if (!has_come(r) && !ended_[r]) return false;
      return true;
    });
    for (std::size_t r = 0; r < calls_.size(); ++r)
      if (!has_come(r))
        return Status::error(Code::device_error, "model: rank " + std::to_string(r) + " has ended its call");
    return {};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::size_t> calls_;  // by rank
  std::vector<bool> ended_;
};

}  // namespace cf::cuda
