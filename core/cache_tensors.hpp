#pragma once
// The tensors of a layer's cache in the contracts of the ops that read or write one. `Args` has k_cache and v_cache,
//   (batch, kv_heads, capacity, head_dim)            in a contiguous cache
//   (pages, kv_heads, page_entries, head_dim)        in a cache of pages,
// and page_table, which is empty in a contiguous cache: entry e of sequence b lies in page
// page_table[b, e / page_entries]. `Dims` has the entries that a sequence may have as `capacity`, and `pool`.
#include "core/cache_view.hpp"
#include "core/contract.hpp"

namespace cf {

/// The pages of a call's cache.
template <class Args>
PageSizes page_sizes(const Args& a) {
  if (!a.page_table) return {};
  return {a.k_cache.shape[0], a.k_cache.shape[2]};
}

/// The entries that a sequence of a call may have.
template <class Args>
std::int64_t cache_capacity(const Args& a) {
  return a.k_cache.shape[2] * (a.page_table ? a.page_table.shape[1] : 1);
}

/// The shape of the keys' and of the values' tensor.
template <class Dims>
std::array<std::int64_t, 4> cache_extents(const Dims& d, std::int64_t kv_heads, std::int64_t head_dim) {
  if (d.pool) return extents(d.pool.pages, kv_heads, d.pool.page_entries, head_dim);
  return extents(d.batch, kv_heads, d.capacity, head_dim);
}

/// The shape of the table, where there are pages.
template <class Dims>
std::array<std::int64_t, 2> page_table_extents(const Dims& d) {
  return extents(d.batch, d.pool.page_entries > 0 ? d.capacity / d.pool.page_entries : 0);
}

/// Lists keys, values and, where there is one, the table.
template <class Dims, class A, class F>
void cache_tensors(Role role, const Dims& d, std::int64_t kv_heads, std::int64_t head_dim, A& a, F&& f) {
  f(TensorSpec{role, "k_cache"}, a.k_cache, cache_extents(d, kv_heads, head_dim));
  f(TensorSpec{role, "v_cache"}, a.v_cache, cache_extents(d, kv_heads, head_dim));
  if (d.pool) f(TensorSpec{Role::page_table, "page_table", true}, a.page_table, page_table_extents(d));
}

/// Refuses numbers below 0 or so large that a sum of them leaves 64 bits, and sinks without a window.
inline Status check_window(std::string_view op, const KeyWindow& w) {
  constexpr std::int64_t most = std::int64_t(1) << 48;
  if (w.keys >= 0 && w.sinks >= 0 && w.keys <= most && w.sinks <= most && (w.keys > 0 || w.sinks == 0)) return {};
  return bad_argument(op, "window must be 0 or more keys, and sinks 0 or more beside a window, got " +
                              std::to_string(w.keys) + " and " + std::to_string(w.sinks));
}
/// The entries that a stream's cache must have room for. With fewer, one of a step's `q_len` new keys would take the
/// place of a key that the step's first row sees.
constexpr std::int64_t stream_entries(const KeyWindow& w, std::int64_t q_len) { return w.sinks + w.keys + q_len - 1; }
/// A stream's length in kv_len's 32 bits: from 2^30 on it is less by whole rounds of a ring, capacity - sinks entries.
constexpr std::int32_t stream_length(std::int64_t length, std::int64_t capacity, std::int64_t sinks) {
  const std::int64_t large = std::int64_t(1) << 30;
  return std::int32_t(length < large ? length : large + (length - large) % (capacity - sinks));
}

}  // namespace cf
