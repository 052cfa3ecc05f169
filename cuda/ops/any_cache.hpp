#pragma once
// The one view of a layer's cache that kernels take for caches of every kind: contiguous, in pages, or a stream's. What
// each function returns is what CacheView, PagedCacheView and RingView of core/cache_view.hpp return.
#include <cstdint>

#include "core/cache_view.hpp"

namespace cf::cuda {

/// Entries of a page that kernels take: a multiple of kPageUnit, so that no tile of kPageUnit keys lies in two pages,
/// up to kMostPageEntries.
inline constexpr int kPageUnit = 64, kMostPageEntries = 1024;
constexpr bool is_page_size(std::int64_t entries) {
  return entries > 0 && entries % kPageUnit == 0 && entries <= kMostPageEntries;
}

/// Where the entries of a cache lie. The kind is a value: with a table the cache lies in pages, and a stream's cache is
/// a ring behind its sinks. Divisions are of 32 bits: an entry's number fits them, as a sequence's length does.
class AnyCacheView {
 public:
  constexpr AnyCacheView() = default;
  /// Of a tensor of keys or of values; the table (sequences, pages of a sequence), or an empty one; and a stream's
  /// window, or an empty one.
  template <class T>
  constexpr AnyCacheView(const View<T, 4>& storage, const View<const std::int32_t, 2>& table, const KeyWindow& stream)
      : table_(table.data),
        capacity_(storage.shape[2] * (table ? table.shape[1] : 1)),
        heads_(std::int32_t(storage.shape[1])),
        head_dim_(std::int32_t(storage.shape[3])),
        matrix_rows_(std::int32_t(storage.shape[2])),
        pages_(table ? std::int32_t(table.shape[1]) : 0),
        sinks_(stream ? std::int32_t(stream.sinks) : 0),
        ring_(stream ? std::int32_t(capacity_ - stream.sinks) : 0) {}

  constexpr AnyCacheView in_units_of(std::int64_t elements) const {
    AnyCacheView view = *this;
    view.head_dim_ = std::int32_t(head_dim_ / elements);
    return view;
  }

  CF_HD constexpr bool in_pages() const { return table_ != nullptr; }
  CF_HD constexpr bool is_stream() const { return ring_ > 0; }

  CF_HD constexpr std::int64_t capacity() const { return capacity_; }
  CF_HD constexpr int heads() const { return heads_; }
  CF_HD constexpr int head_dim() const { return head_dim_; }
  CF_HD constexpr std::int64_t head_stride() const { return std::int64_t(matrix_rows_) * head_dim_; }

  /// The index of an entry among those that its sequence keeps: its number, but in a stream.
  CF_HD constexpr std::int64_t stored_index(std::int64_t entry) const {
    if (!is_stream() || entry < capacity_) return entry;
    return sinks_ + std::uint32_t(entry - sinks_) % std::uint32_t(ring_);
  }

  /// The first element of an entry.
  CF_HD constexpr std::int64_t entry(std::int64_t sequence, std::int64_t head, std::int64_t entry) const {
    return first_element(matrix_row(sequence, head, entry));
  }
  /// Those of n entries from `first` on that lie behind the first.
  CF_HD constexpr CacheRows rows(std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t n) const {
    return rows(sequence, head, first, n, [&](std::uint32_t i) { return page(sequence, i); });
  }
  /// The same for a kernel that has read the table itself: page_of(i) is page(sequence, i).
  template <class PageOf>
  CF_HD constexpr CacheRows rows(std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t n,
                                 PageOf&& page_of) const {
    const std::int64_t at = stored_index(first);
    const MatrixRow from = at_index(sequence, head, at, page_of);
    if (is_stream()) n = capacity_ - at < n ? capacity_ - at : n;
    if (in_pages()) n = matrix_rows_ - from.row < n ? matrix_rows_ - from.row : n;
    return {first_element(from), n};
  }

  /// The tensor as a stack of matrices (matrix_rows(), head_dim), for copies by a map of it. A matrix is a page's head,
  /// or a sequence's. `storages` is the tensor's first extent.
  using MatrixRow = CacheView::MatrixRow;
  constexpr std::int64_t matrices(std::int64_t storages) const { return storages * heads_; }
  CF_HD constexpr std::int64_t matrix_rows() const { return matrix_rows_; }
  /// Where an entry lies in the stack.
  CF_HD constexpr MatrixRow matrix_row(std::int64_t sequence, std::int64_t head, std::int64_t entry) const {
    return at_index(sequence, head, stored_index(entry));
  }
  /// Where the entry of an index lies in the stack.
  CF_HD constexpr MatrixRow at_index(std::int64_t sequence, std::int64_t head, std::int64_t index) const {
    return at_index(sequence, head, index, [&](std::uint32_t i) { return page(sequence, i); });
  }
  template <class PageOf>
  CF_HD constexpr MatrixRow at_index(std::int64_t sequence, std::int64_t head, std::int64_t index,
                                     PageOf&& page_of) const {
    if (!in_pages()) return {sequence * heads_ + head, index};
    const std::uint32_t i = std::uint32_t(index) / std::uint32_t(matrix_rows_);
    return {std::int64_t(page_of(i)) * heads_ + head,
            std::int64_t(std::uint32_t(index) - i * std::uint32_t(matrix_rows_))};
  }
  /// The pages that a sequence may have; 0 without a table.
  CF_HD constexpr int pages() const { return pages_; }
  /// A sequence's i-th page, as the table has it.
  CF_HD constexpr std::int32_t page(std::int64_t sequence, std::int64_t i) const {
    return table_[sequence * pages_ + i];
  }

  /// A stream has no bound.
  CF_HD constexpr int visible_entries(int length, int count, int nth) const {
    return cf::visible_entries(length, count, nth, is_stream() ? length : capacity_);
  }
  CF_HD constexpr int appended_entry(int length, int count, int nth) const {
    return visible_entries(length, count, nth) - 1;
  }

 private:
  CF_HD constexpr std::int64_t first_element(const MatrixRow& at) const {
    return (at.matrix * matrix_rows_ + at.row) * head_dim_;
  }

  const std::int32_t* table_ = nullptr;  // null: contiguous
  std::int64_t capacity_ = 0;
  std::int32_t heads_ = 0, head_dim_ = 0;
  std::int32_t matrix_rows_ = 1;  // entries of a page; of a sequence in a contiguous cache
  std::int32_t pages_ = 0;        // of a row of the table
  std::int32_t sinks_ = 0;
  std::int32_t ring_ = 0;  // entries behind the sinks; 0: no stream
};

}  // namespace cf::cuda
