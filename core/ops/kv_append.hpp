#pragma once
#include "core/cache_tensors.hpp"
#include "core/contract.hpp"
#include "core/row_runs.hpp"

namespace cf::ops {

/// Writes the keys and values of each sequence's new tokens behind its old ones. A run of `count` rows from row r on is
/// sequence b's:
///   k_cache[b, h, kv_len[b] - count + i, :] = k[r + i, h, :], and v likewise,
/// for every kv head h. kv_len counts the entries that are valid after the append. The rest of the cache keeps its
/// bits, and so does all of an idle sequence's, whose kv_len is kIdleLength. Keys are stored after RoPE.
/// With a page_table the caches are (pages, kv_heads, page_entries, head_dim), and entry e of sequence b is entry
/// e % page_entries of page page_table[b, e / page_entries].
/// With a window the cache is a stream's: kv_len may be beyond the capacity, and entry e >= capacity takes the place of
/// entry sinks + (e - sinks) % (capacity - sinks).
/// Source: transformers' DynamicCache.update.
/// Refuses runs that check_row_runs() refuses, without runs tokens that batch does not divide, a stream's capacity
/// below sinks + window + count - 1; where the host can read them, a kv_len outside count .. capacity that is not
/// kIdleLength, and a page for new entries that is outside the pool or in another sequence's table for new entries too.
struct KvAppend {
  static constexpr std::string_view name = "kv_append";
  struct Dims {
    std::int64_t batch, q_len, kv_heads, head_dim, capacity;
    std::int64_t mixed = 0;  // tokens of all runs; 0: each sequence has q_len
    PageSizes pool{};        // the cache's pages; none: it is contiguous
    KeyWindow window{};      // of a stream
    std::int64_t tokens() const { return mixed ? mixed : batch * q_len; }
  };
  struct Args {
    using Op = KvAppend;
    ConstAnyView<3> k{}, v{};              // (tokens, kv_heads, head_dim)
    View<const std::int32_t, 1> kv_len{};  // (batch)
    AnyView<4> k_cache{}, v_cache{};       // (batch, kv_heads, capacity, head_dim), or of pages
    /// Which rows are which sequence's; none: as many of each sequence, in order.
    RowRuns runs{};
    View<const std::int32_t, 2> page_table{};  // (batch, pages of a sequence), or empty: a contiguous cache
    /// Of a stream: the keys that its newest row sees, which stay in the cache.
    KeyWindow window{};
  };

  static Dims dims(const Args& a) {
    const StepRows rows = step_rows(a.k.shape[0], a.kv_len.shape[0], a.runs);
    return {rows.batch, rows.q_len, a.k.shape[1], a.k.shape[2], cache_capacity(a), rows.mixed, page_sizes(a), a.window};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "k"}, a.k, extents(d.tokens(), d.kv_heads, d.head_dim));
    f(TensorSpec{Role::input, "v"}, a.v, extents(d.tokens(), d.kv_heads, d.head_dim));
    f(TensorSpec{Role::length, "kv_len"}, a.kv_len, extents(d.batch));
    cache_tensors(Role::state, d, d.kv_heads, d.head_dim, a, f);
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<KvAppend>(a));
    const Dims d = dims(a);
    CF_TRY(check_window(name, d.window));
    if (const std::int64_t least = stream_entries(d.window, d.q_len); d.window && d.capacity < least)
      return bad_argument(name, "capacity must be at least sinks + window + q_len - 1 = " + std::to_string(least) +
                                    " of a stream, got " + std::to_string(d.capacity));
    return check_rows(name, d, a.runs);
  }
  static Cost cost(const Dims& d, DType activation, DType) {
    const double elements = double(d.tokens() * d.kv_heads * d.head_dim);
    return {4 * elements * double(size_bytes(activation)) + 4 * double(d.batch), 0};
  }
  /// A copy: the bits are the input's.
  static Budget budget(const Dims&, Precision, Condition = {}) { return {}; }

  /// Refuses runs that check_row_runs() refuses, and more new tokens of a sequence than the cache has room for.
  template <class AnyDims>
  static Status check_rows(std::string_view op, const AnyDims& d, RowRuns runs) {
    if (!runs.empty()) CF_TRY(check_row_runs(op, runs, d.batch, d.tokens()));
    if (d.q_len <= d.capacity) return {};
    return bad_argument(
        op, "q_len must be at most capacity " + std::to_string(d.capacity) + ", got " + std::to_string(d.q_len));
  }
};

}  // namespace cf::ops
