#pragma once
#include <algorithm>

#include "core/cache_tensors.hpp"
#include "core/contract.hpp"
#include "core/row_runs.hpp"

namespace cf::ops {

/// Causal attention of new tokens over each sequence's cache, which already holds their keys and values. A run of
/// `count` rows from row r on is sequence b's newest tokens. Query head h reads kv head g = h / (heads / kv_heads), so
/// that heads / kv_heads query heads share each kv head:
///   n = kv_len[b] - count + i + 1                         the number of keys that the run's query i sees
///   s[j] = scale * q[r + i, h, :] . k_cache[b, g, j, :]   for j < n
///   y[r + i, h, :] = sum_j softmax(s)[j] * v_cache[b, g, j, :]
/// The softmax is float32 or wider, whatever the dtype. Cache entries at kv_len[b] and beyond are never read. The
/// results of an idle sequence, whose kv_len is kIdleLength, are NaN.
/// With a window a query sees the newest `window` of its n keys, its own among them, and the first `sinks`: j < sinks
/// or j >= n - window. The scores of j < sinks are those of q_sinks in the place of q. max_kv_len may then be beyond
/// the capacity, where the cache is a stream's (KvAppend).
/// With a page_table the caches lie in pages, as KvAppend says.
/// Source: Vaswani et al. 2017 (arXiv:1706.03762), Ainslie et al. 2023 (arXiv:2305.13245); transformers'
/// GPTNeoXAttention, sdpa; the window as transformers' sliding_window_overlay, sinks as Xiao et al. 2023
/// (arXiv:2309.17453).
/// Refuses heads that are no multiple of kv_heads, scale <= 0, runs that check_row_runs() refuses, without runs tokens
/// that batch does not divide, max_kv_len beyond capacity unless sinks + window + q_len - 1 is within it, sinks without
/// a window; where the host can read them, a kv_len outside count .. max_kv_len that is not kIdleLength, and a page with
/// entries that are seen outside the pool.
struct Attention {
  static constexpr std::string_view name = "attention";
  struct Dims {
    std::int64_t batch, q_len, heads, kv_heads, head_dim, capacity, max_kv_len;
    std::int64_t mixed = 0;  // tokens of all runs; 0: each sequence has q_len
    PageSizes pool{};        // the cache's pages; none: it is contiguous
    KeyWindow window{};
    /// The most keys that a query sees.
    std::int64_t seen() const { return window ? std::min(max_kv_len, window.sinks + window.keys) : max_kv_len; }
    std::int64_t tokens() const { return mixed ? mixed : batch * q_len; }
    /// The kv head that a query head reads.
    std::int64_t kv_head(std::int64_t head) const { return head / (heads / kv_heads); }
  };
  struct Args {
    using Op = Attention;
    ConstAnyView<3> q{};                   // (tokens, heads, head_dim)
    ConstAnyView<4> k_cache{}, v_cache{};  // (batch, kv_heads, capacity, head_dim), or of pages
    View<const std::int32_t, 1> kv_len{};  // (batch)
    AnyView<3> y{};                        // (tokens, heads, head_dim)
    double scale = 1;
    std::int64_t max_kv_len = 0;  // the largest kv_len[b] allowed: launch plans cannot read kv_len from a device
    /// Which rows are which sequence's; none: as many of each sequence, in order.
    RowRuns runs{};
    View<const std::int32_t, 2> page_table{};  // (batch, pages of a sequence), or empty: a contiguous cache
    KeyWindow window{};                        // which keys a query sees; none: all
    ConstAnyView<3> q_sinks{};                 // (tokens, heads, head_dim), or empty without sinks
  };

  static Dims dims(const Args& a) {
    const StepRows rows = step_rows(a.q.shape[0], a.kv_len.shape[0], a.runs);
    return {.batch = rows.batch,
            .q_len = rows.q_len,
            .heads = a.q.shape[1],
            .kv_heads = a.k_cache.shape[1],
            .head_dim = a.q.shape[2],
            .capacity = cache_capacity(a),
            .max_kv_len = a.max_kv_len,
            .mixed = rows.mixed,
            .pool = page_sizes(a),
            .window = a.window};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "q"}, a.q, extents(d.tokens(), d.heads, d.head_dim));
    cache_tensors(Role::cache, d, d.kv_heads, d.head_dim, a, f);
    f(TensorSpec{Role::length, "kv_len"}, a.kv_len, extents(d.batch));
    if (d.window.sinks > 0) f(TensorSpec{Role::input, "q_sinks"}, a.q_sinks, extents(d.tokens(), d.heads, d.head_dim));
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens(), d.heads, d.head_dim));
  }
  static Status check(const Args& a) {
    CF_TRY(check_window(name, a.window));
    CF_TRY(check_tensors<Attention>(a));
    const Dims d = dims(a);
    if (!a.runs.empty()) CF_TRY(check_row_runs(name, a.runs, d.batch, d.tokens()));
    CF_TRY(check_kv_heads(name, d.heads, d.kv_heads));
    if (!(a.scale > 0)) return bad_argument(name, "scale must be positive, got " + std::to_string(a.scale));
    const bool streams = a.window && stream_entries(a.window, d.q_len) <= d.capacity;
    if (a.max_kv_len < d.q_len || (a.max_kv_len > d.capacity && !streams))
      return bad_argument(name, "max_kv_len must be q_len " + std::to_string(d.q_len) + " to capacity " +
                                    std::to_string(d.capacity) + ", got " + std::to_string(a.max_kv_len));
    return {};
  }
  /// Counts max_kv_len cache entries for each sequence, also for one without rows, or those that its rows' windows and
  /// sinks have. A prefill's earlier queries see fewer keys, so its flops are fewer than q_len * max_kv_len would give.
  static Cost cost(const Dims& d, DType activation, DType) {
    const double queries = double(d.tokens() * d.heads), kv_heads = double(d.batch * d.kv_heads), q = double(d.q_len),
                 hd = double(d.head_dim), most = double(d.max_kv_len), seen = double(d.seen());
    const double kv = d.window ? std::min(most, seen + q - 1) : most, keys = std::min(seen, most - (q - 1) / 2);
    return {2 * hd * (kv_heads * kv + queries) * double(size_bytes(activation)) + 4 * double(d.batch),
            4 * queries * hd * keys};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.seen(), p, c); }
};

}  // namespace cf::ops
