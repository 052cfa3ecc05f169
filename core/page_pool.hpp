#pragma once
// The bookkeeping of a cache in pages, on the host: which page holds which entries of which sequence. The pages' memory
// is the backend's.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.hpp"

namespace cf {

/// Pages of `page_entries` cache entries each, for a fixed number of sequences. Entry e of a sequence lies in page
/// table(sequence)[e / page_entries], at place e % page_entries. A page may be in the tables of several sequences that
/// begin alike; before one of them writes to it, that sequence gets a copy of its own. A value: a copy of the pool is a
/// snapshot of it.
class PagePool {
 public:
  /// Entries that a sequence is about to write. Those before `first` stay, those behind the last one are forgotten.
  struct Write {
    std::int64_t sequence = 0, first = 0, count = 1;
    bool operator==(const Write&) const = default;
  };
  /// A page whose first `entries` entries the backend copies to another one.
  struct Copy {
    std::int32_t from = 0, to = 0;
    std::int64_t entries = 0;
    bool operator==(const Copy&) const = default;
  };

  /// All pages are free. Expects positive sizes, and pages that 31 bits can count.
  PagePool(std::int64_t sequences, std::int64_t pages, std::int64_t page_entries);

  std::int64_t sequences() const { return std::int64_t(tables_.size()); }
  std::int64_t pages() const { return std::int64_t(references_.size()); }
  std::int64_t page_entries() const { return page_entries_; }
  /// Pages that are in no table.
  std::int64_t free_pages() const { return std::int64_t(free_.size()); }
  /// The tables that a page is in.
  std::int64_t references(std::int32_t page) const { return references_[std::size_t(page)]; }

  /// A sequence's entries, and its pages in their order: as many as the entries need.
  std::int64_t length(std::int64_t sequence) const { return tables_[std::size_t(sequence)].length; }
  std::span<const std::int32_t> table(std::int64_t sequence) const { return tables_[std::size_t(sequence)].pages; }

  /// Makes room for the entries of a step: afterwards each sequence has first + count entries, and the pages of those
  /// that it writes are its own. Returns the copies that the backend makes, in this order, before anything is written.
  /// Refuses a sequence that is unknown or comes twice, a first entry behind the sequence's last, fewer entries than
  /// one; more pages than are free is Code::out_of_memory. What is refused changes nothing.
  Result<std::vector<Copy>> reserve(std::span<const Write> writes);
  /// What reserve() would say.
  Status check(std::span<const Write> writes) const;
  /// Gives a sequence without entries the first n of another one. They share the pages. Refuses unknown sequences, one
  /// that has entries already, and more entries than the other one has.
  Status fork(std::int64_t from, std::int64_t to, std::int64_t n);
  /// Forgets a sequence's entries from n on. Refuses an unknown sequence, and n beyond its entries.
  Status truncate(std::int64_t sequence, std::int64_t n);
  /// Forgets all entries of a sequence.
  void release(std::int64_t sequence) { cut(tables_[std::size_t(sequence)], 0); }

 private:
  struct Table {
    std::vector<std::int32_t> pages{};
    std::int64_t length = 0;
  };

  std::int64_t pages_of(std::int64_t entries) const { return (entries + page_entries_ - 1) / page_entries_; }
  Status check_sequence(std::int64_t sequence) const;
  Status check_writes(std::span<const Write> writes) const;
  /// Forgets entries from n on, and gives back the pages that hold none of the others.
  void cut(Table& table, std::int64_t n);
  void give_back(std::int32_t page);
  std::int32_t take();
  /// One sequence's part of reserve(); false, with the pool in a state of no use, where too few pages are free.
  bool write(const Write& write, std::vector<Copy>& copies);
  /// Whether the free pages suffice for all writes, even if none of them gives any back.
  bool surely_has_room(std::span<const Write> writes) const;
  Status out_of_pages(std::span<const Write> writes) const;

  std::int64_t page_entries_;
  std::vector<std::int32_t> references_;  // by page
  std::vector<std::int32_t> free_;        // the last one is taken first
  std::vector<Table> tables_;             // by sequence
};

}  // namespace cf
