#pragma once
// The pages of a runner's slots: what the backends that have a cache in pages share.
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/cache_view.hpp"
#include "core/model/run.hpp"
#include "core/page_pool.hpp"
#include "core/status.hpp"

namespace cf {

/// Which pages a runner's slots have, and the table of them that its ops read: a row for each slot, with room for the
/// pages of `capacity` entries. Made without pages, it has none, and every call does nothing. A table says -1 of pages
/// that a slot has not reached.
class SlotPages {
 public:
  /// A cell of the table, by its index row by row, and the page that it has now.
  struct Cell {
    std::int32_t index = 0, page = 0;
    bool operator==(const Cell&) const = default;
  };

  /// Refuses sizes below 1 or beyond 31 bits, pages for streams, which have no use for them, and a capacity beyond the
  /// pages' entries.
  static Status check(const PageSizes& pool, std::int64_t capacity, const KeyWindow& stream);

  SlotPages(std::int64_t slots, std::int64_t capacity, const PageSizes& pool);

  explicit operator bool() const { return pool_.has_value(); }
  PageSizes sizes() const { return sizes_; }
  /// The pages that a slot may have.
  std::int64_t slot_pages() const { return slot_pages_; }
  /// (slots, slot_pages), or empty without pages.
  View<const std::int32_t, 2> table() const;
  std::int64_t free_pages() const { return pool_ ? pool_->free_pages() : 0; }

  /// Whether there is room for the entries of these runs: Code::out_of_memory where there is not.
  Status check(std::span<const Run> runs) const;
  /// Makes that room. Returns the copies of pages that come before anything is written. What is refused changes
  /// nothing.
  Result<std::vector<PagePool::Copy>> reserve(std::span<const Run> runs);
  /// PagePool::fork().
  Status fork(std::int64_t from, std::int64_t to, std::int64_t n);
  /// Forgets a slot's entries from n on, where it has as many.
  void truncate(std::int64_t slot, std::int64_t n);
  void release(std::int64_t slot) { truncate(slot, 0); }
  /// The cells of the table that have changed since the last call.
  std::vector<Cell> take_changes();

 private:
  /// Brings a slot's row of the table up to date.
  void update(std::int64_t slot);

  PageSizes sizes_;
  std::int64_t slot_pages_ = 0;
  std::optional<PagePool> pool_;
  std::vector<std::int32_t> table_, taken_;  // what it is, and what it was at the last take_changes()
  std::vector<std::int64_t> changed_;        // slots whose rows may differ
  std::vector<bool> is_changed_;             // by slot: whether it is among them
};

}  // namespace cf
