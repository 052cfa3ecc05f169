#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/run.hpp"
#include "core/model/shape.hpp"
#include "core/status.hpp"

namespace cf {

/// Refuses an id outside the vocabulary. `owner` and `what` begin the message:
/// "decoder: prompt[3]: expected an id of 0 to 50303, got -1".
Status check_ids(std::string_view owner, std::string_view what, std::span<const std::int32_t> ids,
                 std::int64_t vocab_size);

/// The number of valid cache entries in each slot of a runner, and the checks of a call that depend on it.
class SlotLengths {
 public:
  /// Of slots with room for `capacity` entries each.
  SlotLengths(std::int64_t slots, const ModelSpec& model, std::int64_t capacity)
      : SlotLengths(slots, capacity, entry_limit(model, capacity)) {}
  /// The same, where a runner's limit is another.
  SlotLengths(std::int64_t slots, std::int64_t capacity, const EntryLimit& limit)
      : capacity_(capacity), limit_(limit), lengths_(std::size_t(slots)) {}

  std::int64_t slots() const { return std::int64_t(lengths_.size()); }
  std::int64_t capacity() const { return capacity_; }
  /// The entries that a slot may have.
  std::int64_t most() const { return limit_.most; }
  std::int64_t operator[](std::int64_t slot) const { return lengths_[std::size_t(slot)]; }
  void set(std::int64_t slot, std::int64_t length) { lengths_[std::size_t(slot)] = length; }

  /// Checks a call that gives a slot `tokens` new entries from position `first` on. Refuses a slot number outside
  /// 0 .. slots() - 1, fewer tokens than one, a position beyond the slot's entries, and entries beyond most().
  Status check(std::int64_t slot, std::int64_t first, std::int64_t tokens) const;
  /// Checks the runs of a step. Refuses a list that is empty, what check() above refuses for any of them, and a second
  /// run of the same slot.
  Status check(std::span<const Run> runs) const;

 private:
  std::int64_t capacity_;
  EntryLimit limit_;
  std::vector<std::int64_t> lengths_;
};

}  // namespace cf
