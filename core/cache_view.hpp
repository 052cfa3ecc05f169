#pragma once
// Where the entries of a layer's cache lie, and which of them a step writes and reads. Three numbers of a token are
// kept apart:
//   position   its row of RoPE's table
//   entry      its number among the entries of its sequence's cache, where its key and value are stored
//   length     the valid entries of its sequence after the step's append: what its attention may see
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/host_device.hpp"
#include "core/view.hpp"

namespace cf {

/// The length of a sequence that has no part in a step: nothing is appended to its cache, and its rows of attention's
/// result are NaN.
inline constexpr std::int32_t kIdleLength = 0;

/// How many entries row `nth` of the `count` rows that a step appends to a sequence sees: those up to its own. 0, so
/// that nothing is read, where the sequence is idle or has a length that no such step can give it.
CF_HD constexpr int visible_entries(int length, int count, int nth, std::int64_t capacity) {
  return length < count || length > capacity ? 0 : length - count + nth + 1;
}

/// Entries that lie one behind the other, head_dim elements each.
struct CacheRows {
  std::int64_t first;  // the first element of the first of them
  std::int64_t count;  // of entries
};

/// Where the entries of a layer's cache lie: whoever reads or writes one asks here. Keys and values have a tensor each
/// and lie alike, so one view is of both: what it returns is counted in elements from the first of either tensor. Host
/// and device code pass it by value.
/// The tensors are (sequences, heads, capacity, head_dim). Callers know no more than these functions say.
/// PagedCacheView and RingView have the same functions for entries that lie in pages, and for a cache that keeps a
/// stream's newest entries.
class CacheView {
 public:
  constexpr CacheView() = default;
  CF_HD constexpr CacheView(std::int64_t heads, std::int64_t capacity, std::int64_t head_dim)
      : capacity_(capacity), heads_(std::int32_t(heads)), head_dim_(std::int32_t(head_dim)) {}
  /// Of a tensor of keys or of values.
  template <class T>
  CF_HD constexpr explicit CacheView(const View<T, 4>& storage)
      : CacheView(storage.shape[1], storage.shape[2], storage.shape[3]) {}

  /// The same view counted in units of several elements: a head_dim is a multiple of them.
  constexpr CacheView in_units_of(std::int64_t elements) const { return {heads_, capacity_, head_dim_ / elements}; }

  /// The entries that a sequence may have.
  CF_HD constexpr std::int64_t capacity() const { return capacity_; }
  CF_HD constexpr int heads() const { return heads_; }
  CF_HD constexpr int head_dim() const { return head_dim_; }

  /// The first element of an entry.
  CF_HD constexpr std::int64_t entry(std::int64_t sequence, std::int64_t head, std::int64_t entry) const {
    return (sequence * heads_ + head) * capacity_ * head_dim_ + entry * head_dim_;
  }
  using Rows = CacheRows;
  /// Those of n entries from `first` on that lie behind the first: all of them in a contiguous cache.
  CF_HD constexpr Rows rows(std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t n) const {
    return {entry(sequence, head, first), n};
  }
  /// The elements from an entry of one head to the same entry of the next head.
  CF_HD constexpr std::int64_t head_stride() const { return capacity_ * head_dim_; }

  /// The tensor as a stack of matrices (matrix_rows(), head_dim), for copies by a map of it.
  struct MatrixRow {
    std::int64_t matrix, row;
  };
  constexpr std::int64_t matrices(std::int64_t sequences) const { return sequences * heads_; }
  constexpr std::int64_t matrix_rows() const { return capacity_; }
  /// Where an entry lies in the stack.
  CF_HD constexpr MatrixRow matrix_row(std::int64_t sequence, std::int64_t head, std::int64_t entry) const {
    return {sequence * heads_ + head, entry};
  }

  /// visible_entries() above, written out: kernels compile to other instructions where this calls that.
  CF_HD constexpr int visible_entries(int length, int count, int nth) const {
    return length < count || length > capacity_ ? 0 : length - count + nth + 1;
  }
  /// The entry that this row is stored in; -1, so that nothing is stored, where it sees no entries.
  CF_HD constexpr int appended_entry(int length, int count, int nth) const {
    return visible_entries(length, count, nth) - 1;
  }

 private:
  std::int64_t capacity_ = 0;
  std::int32_t heads_ = 0, head_dim_ = 0;
};

/// The pages of a cache. Without pages it is contiguous.
struct PageSizes {
  std::int64_t pages = 0;         // in all, of all sequences
  std::int64_t page_entries = 0;  // of a page
  constexpr explicit operator bool() const { return pages != 0; }
};

/// A cache in pages: the tensors are (pages, heads, page_entries, head_dim), and entry e of a sequence lies in page
/// table[sequence][e / page_entries] of them. Several sequences may share a page. What the table says of pages that a
/// sequence has not reached is not read.
class PagedCacheView {
 public:
  constexpr PagedCacheView() = default;
  /// A sequence's row of the table is `table_stride` behind the one before it: the pages that a sequence may have.
  CF_HD constexpr PagedCacheView(std::int64_t heads, std::int64_t page_entries, std::int64_t head_dim,
                                 const std::int32_t* table, std::int64_t table_stride)
      : table_(table),
        table_stride_(table_stride),
        heads_(std::int32_t(heads)),
        page_entries_(std::int32_t(page_entries)),
        head_dim_(std::int32_t(head_dim)) {}
  /// Of a tensor of keys or of values, and the table (sequences, pages of a sequence).
  template <class T>
  CF_HD constexpr PagedCacheView(const View<T, 4>& storage, const View<const std::int32_t, 2>& table)
      : PagedCacheView(storage.shape[1], storage.shape[2], storage.shape[3], table.data, table.shape[1]) {}

  constexpr PagedCacheView in_units_of(std::int64_t elements) const {
    return {heads_, page_entries_, head_dim_ / elements, table_, table_stride_};
  }

  CF_HD constexpr std::int64_t capacity() const { return table_stride_ * page_entries_; }
  CF_HD constexpr int heads() const { return heads_; }
  CF_HD constexpr int head_dim() const { return head_dim_; }
  CF_HD constexpr int page_entries() const { return page_entries_; }

  CF_HD constexpr std::int32_t page(std::int64_t sequence, std::int64_t entry) const {
    return table_[sequence * table_stride_ + entry / page_entries_];
  }
  CF_HD constexpr std::int64_t entry(std::int64_t sequence, std::int64_t head, std::int64_t entry) const {
    const std::int64_t row = (std::int64_t(page(sequence, entry)) * heads_ + head) * page_entries_;
    return (row + entry % page_entries_) * head_dim_;
  }
  /// Those up to the end of the first one's page.
  CF_HD constexpr CacheRows rows(std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t n) const {
    const std::int64_t left = page_entries_ - first % page_entries_;
    return {entry(sequence, head, first), n < left ? n : left};
  }
  CF_HD constexpr std::int64_t head_stride() const { return std::int64_t(page_entries_) * head_dim_; }

  CF_HD constexpr int visible_entries(int length, int count, int nth) const {
    return cf::visible_entries(length, count, nth, capacity());
  }
  CF_HD constexpr int appended_entry(int length, int count, int nth) const {
    return visible_entries(length, count, nth) - 1;
  }

 private:
  const std::int32_t* table_ = nullptr;
  std::int64_t table_stride_ = 0;
  std::int32_t heads_ = 0, page_entries_ = 1, head_dim_ = 0;
};

/// Which of the entries up to its own a row sees: the newest `keys` of them, its own among them, and the first `sinks`.
/// Without keys it sees all.
struct KeyWindow {
  std::int64_t keys = 0, sinks = 0;
  constexpr explicit operator bool() const { return keys > 0; }
  /// The first entry behind the sinks that is seen by a row which has `visible` entries up to its own.
  CF_HD constexpr std::int64_t first(std::int64_t visible) const {
    const std::int64_t oldest = keys > 0 && visible > keys ? visible - keys : 0;
    return oldest < sinks ? (sinks < visible ? sinks : visible) : oldest;
  }
  bool operator==(const KeyWindow&) const = default;
};

/// A view of a stream's cache. The first `sinks` entries of a sequence stay. The others take places behind them in
/// turn: a new entry takes the oldest one's place where there is none left.
template <class Inner>
class RingView {
 public:
  CF_HD constexpr RingView(const Inner& inner, std::int64_t sinks) : inner_(inner), sinks_(sinks) {}

  /// The entries that a sequence keeps.
  CF_HD constexpr std::int64_t capacity() const { return inner_.capacity(); }
  CF_HD constexpr int heads() const { return inner_.heads(); }
  CF_HD constexpr int head_dim() const { return inner_.head_dim(); }

  /// The index of an entry among those that its sequence keeps.
  CF_HD constexpr std::int64_t stored_index(std::int64_t entry) const {
    return entry < capacity() ? entry : sinks_ + (entry - sinks_) % (capacity() - sinks_);
  }
  CF_HD constexpr std::int64_t entry(std::int64_t sequence, std::int64_t head, std::int64_t entry) const {
    return inner_.entry(sequence, head, stored_index(entry));
  }
  CF_HD constexpr CacheRows rows(std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t n) const {
    const std::int64_t at = stored_index(first), left = capacity() - at;
    return inner_.rows(sequence, head, at, n < left ? n : left);
  }
  CF_HD constexpr std::int64_t head_stride() const { return inner_.head_stride(); }

  /// A stream has no bound.
  CF_HD constexpr int visible_entries(int length, int count, int nth) const {
    return cf::visible_entries(length, count, nth, length);
  }
  CF_HD constexpr int appended_entry(int length, int count, int nth) const {
    return visible_entries(length, count, nth) - 1;
  }

 private:
  Inner inner_;
  std::int64_t sinks_;
};

/// Calls f with the view of a cache: in pages where there is a table, and as a ring behind the sinks where it is a
/// stream's.
template <class T, class F>
auto with_cache_view(const View<T, 4>& storage, const View<const std::int32_t, 2>& table, const KeyWindow& stream,
                     F&& f) {
  const auto with_ring = [&](const auto& view) { return stream ? f(RingView(view, stream.sinks)) : f(view); };
  return table ? with_ring(PagedCacheView(storage, table)) : with_ring(CacheView(storage));
}

/// Calls f(rows) for each stretch of entries [first, first + n) of a head that lie one behind the other, in order.
template <class Cache, class F>
void for_each_rows(const Cache& cache, std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t n,
                   F&& f) {
  while (n > 0) {
    const CacheRows rows = cache.rows(sequence, head, first, n);
    f(rows);
    first += rows.count;
    n -= rows.count;
  }
}

/// The tensor of keys or of values of sequences [first, first + count) alone.
template <class V>
requires std::is_void_v<std::remove_const_t<V>> View<V, 4> cache_of(View<V, 4> storage, std::int64_t first,
                                                                    std::int64_t count) {
  using Byte = std::conditional_t<std::is_const_v<V>, const std::byte, std::byte>;
  const std::int64_t before = CacheView(storage).entry(first, 0, 0);
  storage.data = static_cast<Byte*>(storage.data) + before * std::int64_t(size_bytes(storage.dtype));
  storage.shape[0] = count;
  return storage;
}

}  // namespace cf
