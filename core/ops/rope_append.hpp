#pragma once
#include "core/ops/kv_append.hpp"
#include "core/ops/rope.hpp"

namespace cf::ops {

/// RoPE and the append to the cache in one op.
///   q, k, v = Rope(qkv),  k_cache and v_cache = KvAppend(k, v)
/// Rope and KvAppend define the rest. k and v are not outputs.
/// Source: transformers' GPTNeoXAttention and LlamaAttention between the QKV product and the attention itself.
/// Refuses what Rope and KvAppend refuse.
struct RopeAppend {
  static constexpr std::string_view name = "rope_append";
  struct Dims {
    std::int64_t batch, q_len, heads, kv_heads, head_dim, rotary_dim, table_rows, capacity;
    QkvLayout layout = QkvLayout::interleaved_by_head;
    std::int64_t mixed = 0;  // tokens of all runs; 0: each sequence has q_len
    PageSizes pool{};        // the cache's pages; none: it is contiguous
    std::int64_t tokens() const { return mixed ? mixed : batch * q_len; }
    QkvHeads qkv() const { return {heads, kv_heads, layout}; }
  };
  struct Args {
    using Op = RopeAppend;
    ConstAnyView<4> qkv{};                    // (tokens, heads, 3, head_dim), or as the layout says
    View<const float, 2> cos{}, sin{};        // (table_rows, rotary_dim / 2)
    View<const std::int32_t, 1> positions{};  // (tokens)
    View<const std::int32_t, 1> kv_len{};     // (batch)
    AnyView<3> q{};                           // (tokens, heads, head_dim)
    AnyView<4> k_cache{}, v_cache{};          // (batch, kv_heads, capacity, head_dim), or of pages
    QkvLayout layout = QkvLayout::interleaved_by_head;
    /// Which rows are which sequence's; none: as many of each sequence, in order.
    RowRuns runs{};
    View<const std::int32_t, 2> page_table{};  // (batch, pages of a sequence), or empty: a contiguous cache
  };

  static Dims dims(const Args& a) {
    const StepRows rows = step_rows(a.qkv.shape[0], a.kv_len.shape[0], a.runs);
    const bool separate = a.layout == QkvLayout::separate;
    return {rows.batch,
            rows.q_len,
            separate ? a.q.shape[1] : a.qkv.shape[1],
            separate ? a.k_cache.shape[1] : a.qkv.shape[1],
            a.qkv.shape[3],
            2 * a.cos.shape[1],
            a.cos.shape[0],
            cache_capacity(a),
            a.layout,
            rows.mixed,
            page_sizes(a)};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "qkv"}, a.qkv, d.qkv().extents_of(d.tokens(), d.head_dim));
    Rope::table_tensors(d.table_rows, d.rotary_dim, a, f);
    f(TensorSpec{Role::position, "positions"}, a.positions, extents(d.tokens()));
    f(TensorSpec{Role::length, "kv_len"}, a.kv_len, extents(d.batch));
    f(TensorSpec{Role::output, "q"}, a.q, extents(d.tokens(), d.heads, d.head_dim));
    cache_tensors(Role::state, d, d.kv_heads, d.head_dim, a, f);
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<RopeAppend>(a));
    const Dims d = dims(a);
    CF_TRY(d.qkv().check(name));
    CF_TRY(Rope::check_rotary_dim(name, d.head_dim, d.rotary_dim));
    return KvAppend::check_rows(name, d, a.runs);
  }
  /// Rope's, whose k and v go to the caches, and kv_len.
  static Cost cost(const Dims& d, DType activation, DType weight) {
    return Rope::cost(rope_dims(d), activation, weight) += {4 * double(d.batch), 0};
  }
  /// An append rounds nothing.
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return Rope::budget(rope_dims(d), p, c); }

  /// The op as its parts: calls f with the Args of Rope and KvAppend in turn, with k and v in the given tensors, and
  /// stops at the first Status that is not ok.
  template <class F>
  static Status for_each_part(const Args& a, const AnyView<3>& k, const AnyView<3>& v, F&& f) {
    CF_TRY(f(Rope::Args{.qkv = a.qkv,
                        .cos = a.cos,
                        .sin = a.sin,
                        .positions = a.positions,
                        .q = a.q,
                        .k = k,
                        .v = v,
                        .layout = a.layout}));
    return f(KvAppend::Args{.k = k,
                            .v = v,
                            .kv_len = a.kv_len,
                            .k_cache = a.k_cache,
                            .v_cache = a.v_cache,
                            .runs = a.runs,
                            .page_table = a.page_table});
  }
  /// The inverse of for_each_part, for a cache that is no stream's.
  static Args of_parts(const Rope::Args& rope, const KvAppend::Args& append) {
    return {.qkv = rope.qkv,
            .cos = rope.cos,
            .sin = rope.sin,
            .positions = rope.positions,
            .kv_len = append.kv_len,
            .q = rope.q,
            .k_cache = append.k_cache,
            .v_cache = append.v_cache,
            .layout = rope.layout,
            .runs = append.runs,
            .page_table = append.page_table};
  }

 private:
  static Rope::Dims rope_dims(const Dims& d) {
    return {d.tokens(), d.heads, d.kv_heads, d.head_dim, d.rotary_dim, d.table_rows, d.layout};
  }
};

}  // namespace cf::ops
