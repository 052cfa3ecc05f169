#pragma once
#include <algorithm>

#include "core/ops/kv_append.hpp"

namespace cf::ops {

/// The keys and values of one sequence by token, as callers hold them beside the cache: each row has a token's kv heads
/// side by side.
struct TokenRows {
  AnyView<2> k{}, v{};     // (rows, kv_heads * head_dim)
  std::int64_t first = 0;  // the first row that the cache does not have as an entry yet
  std::int64_t last = 0;   // the new token's row
};

/// The append of one token to the cache of one sequence whose caller holds keys and values as rows, too.
///   k_rows[last, h * head_dim : (h + 1) * head_dim] = k[0, h, :]
///   k_cache[0, h, j, :] = k_rows[j, h * head_dim : (h + 1) * head_dim]     first <= j <= last
/// for every kv head h, and v likewise. With is_appended the cache has entry `last` already, which is not written
/// again: attention may read it at the same time. The rest of the cache and of the rows keeps its bits. A cache in pages
/// is KvAppend's.
/// Source: ClusterFusion's decoder layers, whose callers grow a cache of rows by themselves.
/// Refuses runs and windows; rows other than 0 <= first <= last, with `last` beyond the rows or the cache's capacity;
/// where the host can read them, a kv_len that is not last + 1, and pages that KvAppend refuses.
struct AppendRows {
  static constexpr std::string_view name = "append_rows";
  struct Dims {
    std::int64_t rows, kv_heads, head_dim, capacity;
    std::int64_t copied = 0;   // rows before the new one that become entries
    bool is_appended = false;  // the cache has the new token's entry
    PageSizes pool{};          // the cache's pages; none: it is contiguous
    /// Whether anything of the cache is written.
    bool writes_cache() const { return copied > 0 || !is_appended; }
  };
  struct Args {
    using Op = AppendRows;
    KvAppend::Args append{};  // of one token of one sequence: k, v (1, kv_heads, head_dim), kv_len (1)
    TokenRows rows{};         // k_rows and v_rows
    bool is_appended = false;
  };

  static Dims dims(const Args& a) {
    const auto& [k, v, first, last] = a.rows;
    const std::int64_t copied = 0 <= first && first <= last ? last - first : 0;
    return {k.shape[0], a.append.k.shape[1], a.append.k.shape[2], cache_capacity(a.append),
            copied,     a.is_appended,       page_sizes(a.append)};
  }
  /// A cache that is not written is no tensor of the call.
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    KvAppend::tensors({.batch = 1,
                       .q_len = 1,
                       .kv_heads = d.kv_heads,
                       .head_dim = d.head_dim,
                       .capacity = d.capacity,
                       .pool = d.pool},
                      a.append, [&](const TensorSpec& t, auto& view, const auto& shape) {
                        if ((t.role != Role::state && t.role != Role::page_table) || d.writes_cache())
                          f(t, view, shape);
                      });
    f(TensorSpec{Role::state, "k_rows"}, a.rows.k, extents(d.rows, d.kv_heads * d.head_dim));
    f(TensorSpec{Role::state, "v_rows"}, a.rows.v, extents(d.rows, d.kv_heads * d.head_dim));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<AppendRows>(a));
    if (!a.append.runs.empty()) return bad_argument(name, "runs must be empty: the rows are one token's");
    if (a.append.window) return bad_argument(name, "window must be empty: the cache keeps all entries");
    const Dims d = dims(a);
    const auto& [k, v, first, last] = a.rows;
    if (first < 0 || first > last)
      return bad_argument(name, "first must be 0 to last " + std::to_string(last) + ", got " + std::to_string(first));
    const std::int64_t most = std::min(d.rows, d.writes_cache() ? d.capacity : d.rows) - 1;
    if (last <= most) return {};
    return bad_argument(name, "last must be at most " + std::to_string(most) +
                                  ", the last row or entry that there is, got " + std::to_string(last));
  }
  static Cost cost(const Dims& d, DType activation, DType) {
    const double row = 2 * double(d.kv_heads * d.head_dim * std::int64_t(size_bytes(activation)));  // of k and v
    return {row * (2 + 2 * double(d.copied) + (d.is_appended ? 0 : 1)) + 4, 0};
  }
  /// A copy: the bits are the input's.
  static Budget budget(const Dims&, Precision, Condition = {}) { return {}; }

  /// The op as its parts: calls f with the Args of KvAppend once for the new row, where the rows are the cache of a
  /// sequence with one head, and once for the entries that are copied from the rows, if any; stops at the first Status
  /// that is not ok. The second call's kv_len lies on the host, and is valid during that call.
  template <class F>
  static Status for_each_part(const Args& a, F&& f) {
    const Dims d = dims(a);
    const std::int64_t width = d.kv_heads * d.head_dim;
    const auto wide = [&](const ConstAnyView<3>& token) {
      return ConstAnyView<3>(token.data, {1, 1, width}, token.dtype);
    };
    const auto as_cache = [&](const AnyView<2>& rows) {
      return AnyView<4>(rows.data, {1, 1, d.rows, width}, rows.dtype);
    };
    CF_TRY(f(KvAppend::Args{.k = wide(a.append.k),
                            .v = wide(a.append.v),
                            .kv_len = a.append.kv_len,
                            .k_cache = as_cache(a.rows.k),
                            .v_cache = as_cache(a.rows.v)}));
    if (!d.writes_cache()) return {};
    const std::int64_t count = d.copied + (d.is_appended ? 0 : 1);
    const auto length = std::int32_t(a.rows.first + count);
    const auto tokens = [&](const AnyView<2>& rows) {
      const std::int64_t before = a.rows.first * width * std::int64_t(size_bytes(rows.dtype));
      return ConstAnyView<3>(static_cast<const std::byte*>(rows.data) + before, {count, d.kv_heads, d.head_dim},
                             rows.dtype);
    };
    return f(KvAppend::Args{.k = tokens(a.rows.k),
                            .v = tokens(a.rows.v),
                            .kv_len = {&length, {1}},
                            .k_cache = a.append.k_cache,
                            .v_cache = a.append.v_cache,
                            .page_table = a.append.page_table});
  }
};

}  // namespace cf::ops
