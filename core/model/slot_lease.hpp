#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/model/runner.hpp"
#include "core/status.hpp"

namespace cf {

class SlotLease;

/// A runner whose slots several holders share. Threads may lease and give back slots at any time; whoever uses the
/// runner, or ends it, does so while no one else does.
class SharedRunner {
 public:
  explicit SharedRunner(std::unique_ptr<ModelRunner> runner);

  std::int64_t slots() const { return std::int64_t(taken_.size()); }
  /// Slots that no lease has.
  std::int64_t free_slots() const;
  /// The runner. Code::device_error once close() was called.
  Result<ModelRunner*> runner() const;
  /// Destroys the runner. Its leases stay, and are of no use.
  void close() { runner_.reset(); }

 private:
  friend class SlotLease;
  /// Forgets the entries of slots that were given back, where other slots can have their pages.
  void forget_returned();
  std::unique_ptr<ModelRunner> runner_;
  mutable std::mutex mutex_;            // of what follows
  std::vector<bool> taken_;             // by slot
  std::vector<std::int64_t> returned_;  // slots that are free and have entries yet
};

/// Some slots of a shared runner, until the lease ends: what a decoder and others use a runner through.
class SlotLease {
 public:
  /// Takes slots that no lease has, and forgets their entries. Refuses more than are free, and less than one.
  static Result<std::shared_ptr<SlotLease>> create(std::shared_ptr<SharedRunner> shared, std::int64_t slots);
  /// All slots of a runner that no one shares.
  static std::shared_ptr<SlotLease> of_all(std::unique_ptr<ModelRunner> runner);
  SlotLease(const SlotLease&) = delete;
  SlotLease& operator=(const SlotLease&) = delete;
  ~SlotLease() { close(); }

  /// Gives the slots back. Their entries are forgotten when the runner is used next.
  void close();
  /// Whether the lease has its slots, and the runner lives.
  bool is_open() const { return is_open_ && shared_->runner(); }
  std::int64_t slots() const { return std::int64_t(slots_.size()); }
  /// The runner's number of the lease's slot i.
  std::int64_t operator[](std::int64_t i) const { return slots_[std::size_t(i)]; }
  /// The runner, or why it is no longer the lease's.
  Result<ModelRunner*> runner() const;

 private:
  SlotLease(std::shared_ptr<SharedRunner> shared, std::vector<std::int64_t> slots)
      : shared_(std::move(shared)), slots_(std::move(slots)) {}
  std::shared_ptr<SharedRunner> shared_;
  std::vector<std::int64_t> slots_;
  bool is_open_ = true;
};

}  // namespace cf
