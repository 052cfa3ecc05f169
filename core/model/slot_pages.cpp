#include "core/model/slot_pages.hpp"

#include <algorithm>
#include <string>

#include "core/model/shape.hpp"

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

std::vector<PagePool::Write> writes_of(std::span<const Run> runs) {
  std::vector<PagePool::Write> writes;
  for (const Run& r : runs) writes.push_back({.sequence = r.sequence, .first = r.first_position, .count = r.count});
  return writes;
}

}  // namespace

Status SlotPages::check(const PageSizes& pool, std::int64_t capacity, const KeyWindow& stream) {
  if (!pool) return {};
  constexpr std::int64_t most = (std::int64_t(1) << 31) - 1;
  CF_TRY(check_sizes({{"pages", pool.pages, most}, {"page_entries", pool.page_entries, most}}));
  if (stream) return refused("pages: expected none for streams, got " + std::to_string(pool.pages));
  const std::int64_t entries = pool.pages * pool.page_entries;
  if (capacity <= entries) return {};
  return refused("capacity: expected at most " + std::to_string(entries) + " entries, those of " +
                 std::to_string(pool.pages) + " pages, got " + std::to_string(capacity));
}

SlotPages::SlotPages(std::int64_t slots, std::int64_t capacity, const PageSizes& pool) : sizes_(pool) {
  if (!pool) return;
  slot_pages_ = (capacity + pool.page_entries - 1) / pool.page_entries;
  pool_.emplace(slots, pool.pages, pool.page_entries);
  table_.assign(std::size_t(slots * slot_pages_), -1);
  taken_ = table_;
  is_changed_.assign(std::size_t(slots), false);
}

View<const std::int32_t, 2> SlotPages::table() const {
  if (!pool_) return {};
  return {table_.data(), {pool_->sequences(), slot_pages_}};
}

void SlotPages::update(std::int64_t slot) {
  const auto row = table_.begin() + slot * slot_pages_;
  std::fill(std::copy(pool_->table(slot).begin(), pool_->table(slot).end(), row), row + slot_pages_, -1);
  if (!is_changed_[std::size_t(slot)]) changed_.push_back(slot);
  is_changed_[std::size_t(slot)] = true;
}

Status SlotPages::check(std::span<const Run> runs) const { return pool_ ? pool_->check(writes_of(runs)) : Status(); }

Result<std::vector<PagePool::Copy>> SlotPages::reserve(std::span<const Run> runs) {
  if (!pool_) return std::vector<PagePool::Copy>();
  CF_TRY_ASSIGN(std::vector<PagePool::Copy> copies, pool_->reserve(writes_of(runs)));
  for (const Run& r : runs) update(r.sequence);
  return copies;
}

Status SlotPages::fork(std::int64_t from, std::int64_t to, std::int64_t n) {
  CF_TRY(pool_->fork(from, to, n));
  update(to);
  return {};
}

void SlotPages::truncate(std::int64_t slot, std::int64_t n) {
  if (!pool_ || pool_->length(slot) <= n) return;
  (void)pool_->truncate(slot, n);
  update(slot);
}

std::vector<SlotPages::Cell> SlotPages::take_changes() {
  std::vector<Cell> cells;
  for (std::int64_t slot : changed_) {
    is_changed_[std::size_t(slot)] = false;
    for (std::int64_t i = slot * slot_pages_; i < (slot + 1) * slot_pages_; ++i)
      if (std::int32_t& was = taken_[std::size_t(i)]; was != table_[std::size_t(i)]) {
        was = table_[std::size_t(i)];
        cells.push_back({std::int32_t(i), was});
      }
  }
  changed_.clear();
  return cells;
}

}  // namespace cf
