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

/// Where the entries of a layer's cache lie: whoever reads or writes one asks here. Keys and values have a tensor each
/// and lie alike, so one view is of both: what it returns is counted in elements from the first of either tensor. Host
/// and device code pass it by value.
/// The tensors are (sequences, heads, capacity, head_dim). Callers know no more than these functions say, so that
/// entries can lie in pages, or some of them in a ring.
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
  /// Entries that lie one behind the other, head_dim elements each.
  struct Rows {
    std::int64_t first;  // the first element of the first of them
    std::int64_t count;  // of entries
  };
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

  /// How many entries row `nth` of the `count` rows that a step appends to a sequence sees: those up to its own. 0, so
  /// that nothing is read, where the sequence is idle or has a length that no such step can give it.
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
