#include "core/page_pool.hpp"

#include <algorithm>
#include <utility>

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "pages: " + std::move(what)); }

}  // namespace

PagePool::PagePool(std::int64_t sequences, std::int64_t pages, std::int64_t page_entries)
    : page_entries_(page_entries), references_(std::size_t(pages)), tables_(std::size_t(sequences)) {
  // Page 0 is taken first.
  for (std::int64_t page = pages; page-- > 0;) free_.push_back(std::int32_t(page));
}

Status PagePool::check_sequence(std::int64_t sequence) const {
  if (sequence >= 0 && sequence < sequences()) return {};
  return refused("expected a sequence of 0 to " + std::to_string(sequences() - 1) + ", got " +
                 std::to_string(sequence));
}

Status PagePool::check_writes(std::span<const Write> writes) const {
  std::vector<bool> seen(tables_.size());
  for (std::size_t i = 0; i < writes.size(); ++i) {
    const auto& [sequence, first, count] = writes[i];
    CF_TRY(check_sequence(sequence));
    const std::string name = "sequence " + std::to_string(sequence) + ": ";
    if (seen[std::size_t(sequence)]) return refused(name + "expected one write a step, got two");
    seen[std::size_t(sequence)] = true;
    if (first < 0 || first > length(sequence))
      return refused(name + "expected a first entry of 0 to " + std::to_string(length(sequence)) + ", got " +
                     std::to_string(first));
    if (count < 1) return refused(name + "expected at least one entry, got " + std::to_string(count));
    if (count > pages() * page_entries_) return out_of_pages(std::span(&writes[i], 1));
  }
  return {};
}

void PagePool::give_back(std::int32_t page) {
  if (--references_[std::size_t(page)] == 0) free_.push_back(page);
}

std::int32_t PagePool::take() {
  const std::int32_t page = free_.back();
  free_.pop_back();
  references_[std::size_t(page)] = 1;
  return page;
}

void PagePool::cut(Table& table, std::int64_t n) {
  for (const std::int64_t kept = pages_of(n); std::int64_t(table.pages.size()) > kept; table.pages.pop_back())
    give_back(table.pages.back());
  table.length = n;
}

bool PagePool::write(const Write& write, std::vector<Copy>& copies) {
  Table& table = tables_[std::size_t(write.sequence)];
  cut(table, write.first);
  // Of the pages that are kept, the last alone may get entries.
  if (const std::int64_t entries = write.first % page_entries_;
      entries > 0 && references_[std::size_t(table.pages.back())] > 1) {
    if (free_.empty()) return false;
    const std::int32_t shared = table.pages.back();
    table.pages.back() = take();
    give_back(shared);
    copies.push_back({.from = shared, .to = table.pages.back(), .entries = entries});
  }
  const std::int64_t missing = pages_of(write.first + write.count) - std::int64_t(table.pages.size());
  if (missing > free_pages()) return false;
  for (std::int64_t i = 0; i < missing; ++i) table.pages.push_back(take());
  table.length = write.first + write.count;
  return true;
}

bool PagePool::surely_has_room(std::span<const Write> writes) const {
  std::int64_t needed = 0;
  for (const auto& [sequence, first, count] : writes) {
    needed += pages_of(first + count) - pages_of(first);
    if (first % page_entries_ > 0 && references(table(sequence)[std::size_t(first / page_entries_)]) > 1) ++needed;
  }
  return needed <= free_pages();
}

Status PagePool::out_of_pages(std::span<const Write> writes) const {
  std::int64_t entries = 0;
  for (const Write& w : writes) entries += w.count;
  return Status::error(Code::out_of_memory, "pages: expected free ones for " + std::to_string(entries) +
                                                " more entries, got " + std::to_string(free_pages()) + " of " +
                                                std::to_string(pages()) + " pages of " + std::to_string(page_entries_) +
                                                " entries");
}

Result<std::vector<PagePool::Copy>> PagePool::reserve(std::span<const Write> writes) {
  CF_TRY(check_writes(writes));
  std::vector<Copy> copies;
  const auto write_all = [&](PagePool& pool) {
    return std::all_of(writes.begin(), writes.end(), [&](const Write& w) { return pool.write(w, copies); });
  };
  if (surely_has_room(writes)) {
    write_all(*this);
    return copies;
  }
  PagePool after = *this;
  if (!write_all(after)) return out_of_pages(writes);
  *this = std::move(after);
  return copies;
}

Status PagePool::check(std::span<const Write> writes) const {
  CF_TRY(check_writes(writes));
  if (surely_has_room(writes)) return {};
  return PagePool(*this).reserve(writes).status();
}

Status PagePool::fork(std::int64_t from, std::int64_t to, std::int64_t n) {
  CF_TRY(check_sequence(from));
  CF_TRY(check_sequence(to));
  if (length(to) > 0)
    return refused("sequence " + std::to_string(to) + ": expected one without entries, got " +
                   std::to_string(length(to)));
  if (n < 0 || n > length(from))
    return refused("sequence " + std::to_string(from) + ": expected 0 to " + std::to_string(length(from)) +
                   " entries to share, got " + std::to_string(n));
  const std::span<const std::int32_t> shared = table(from).first(std::size_t(pages_of(n)));
  Table& table = tables_[std::size_t(to)];
  table.pages.assign(shared.begin(), shared.end());
  for (const std::int32_t page : table.pages) ++references_[std::size_t(page)];
  table.length = n;
  return {};
}

Status PagePool::truncate(std::int64_t sequence, std::int64_t n) {
  CF_TRY(check_sequence(sequence));
  if (n < 0 || n > length(sequence))
    return refused("sequence " + std::to_string(sequence) + ": expected 0 to " + std::to_string(length(sequence)) +
                   " entries to keep, got " + std::to_string(n));
  cut(tables_[std::size_t(sequence)], n);
  return {};
}

}  // namespace cf
