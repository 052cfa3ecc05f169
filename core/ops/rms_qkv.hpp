#pragma once
#include "core/ops/rms_linear.hpp"
#include "core/ops/rope_append.hpp"

namespace cf::ops {

/// RMSNorm, the QKV product, RoPE and the append to the cache in one op:
///   w = RmsLinear(x; gamma, linear, eps)                          (tokens, (heads + 2 * kv_heads) * head_dim)
///   q, k_cache and v_cache = RopeAppend(w)
/// w has all heads of q, then of k, then of v: QkvLayout::separate. w, k and v are not outputs. RmsLinear and
/// RopeAppend define the rest.
/// Source: transformers' LlamaDecoderLayer.input_layernorm and LlamaAttention up to the attention itself.
/// Refuses what RmsLinear and RopeAppend refuse.
struct RmsQkv {
  static constexpr std::string_view name = "rms_qkv";
  struct Dims {
    std::int64_t batch, q_len, hidden, heads, kv_heads, head_dim, rotary_dim, table_rows, capacity;
    WeightFormat weight{};
    std::int64_t mixed = 0;  // tokens of all runs; 0: each sequence has q_len
    PageSizes pool{};        // the cache's pages; none: it is contiguous
    std::int64_t tokens() const { return mixed ? mixed : batch * q_len; }
    QkvHeads qkv() const { return {heads, kv_heads, QkvLayout::separate}; }
    std::int64_t out() const { return (heads + 2 * kv_heads) * head_dim; }
  };
  struct Args {
    using Op = RmsQkv;
    ConstAnyView<2> x{};                      // (tokens, hidden)
    ConstAnyView<1> gamma{};                  // (hidden)
    LinearParams linear{};                    // weight ((heads + 2 * kv_heads) * head_dim, hidden), bias or empty
    View<const float, 2> cos{}, sin{};        // (table_rows, rotary_dim / 2)
    View<const std::int32_t, 1> positions{};  // (tokens)
    View<const std::int32_t, 1> kv_len{};     // (batch)
    AnyView<3> q{};                           // (tokens, heads, head_dim)
    AnyView<4> k_cache{}, v_cache{};          // (batch, kv_heads, capacity, head_dim), or of pages
    double eps = 1e-5;
    /// Which rows are which sequence's; none: as many of each sequence, in order.
    RowRuns runs{};
    View<const std::int32_t, 2> page_table{};  // (batch, pages of a sequence), or empty: a contiguous cache
  };

  static Dims dims(const Args& a) {
    const StepRows rows = step_rows(a.x.shape[0], a.kv_len.shape[0], a.runs);
    return {rows.batch,   rows.q_len,         a.x.shape[1],   a.q.shape[1],      a.k_cache.shape[1],
            a.q.shape[2], 2 * a.cos.shape[1], a.cos.shape[0], cache_capacity(a), format_of(a.linear.weight),
            rows.mixed,   page_sizes(a)};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens(), d.hidden));
    f(TensorSpec{Role::gain, "gamma"}, a.gamma, extents(d.hidden));
    Linear::linear_tensors(d.out(), d.hidden, a.linear, f);
    Rope::table_tensors(d.table_rows, d.rotary_dim, a, f);
    f(TensorSpec{Role::position, "positions"}, a.positions, extents(d.tokens()));
    f(TensorSpec{Role::length, "kv_len"}, a.kv_len, extents(d.batch));
    f(TensorSpec{Role::output, "q"}, a.q, extents(d.tokens(), d.heads, d.head_dim));
    cache_tensors(Role::state, d, d.kv_heads, d.head_dim, a, f);
  }
  static Status check(const Args& a) {
    const Dims d = dims(a);
    CF_TRY(Linear::check_linear(name, d.out(), d.hidden, a.linear));
    CF_TRY(check_tensors<RmsQkv>(a));
    if (!(a.eps > 0)) return bad_argument(name, "eps must be positive, got " + std::to_string(a.eps));
    CF_TRY(d.qkv().check(name));
    CF_TRY(Rope::check_rotary_dim(name, d.head_dim, d.rotary_dim));
    return KvAppend::check_rows(name, d, a.runs);
  }
  /// The sum of Linear's and RopeAppend's, less w, which is neither written nor read, and with gamma.
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double w = double(d.tokens()) * double(d.out()) * double(size_bytes(activation));
    Cost c = Linear::cost({d.tokens(), d.hidden, d.out(), false, d.weight}, activation, weight);
    c += RopeAppend::cost({d.batch, d.q_len, d.heads, d.kv_heads, d.head_dim, d.rotary_dim, d.table_rows, d.capacity,
                           QkvLayout::separate, d.mixed},
                          activation, weight);
    return c += {double(d.hidden) * double(size_bytes(weight)) - 2 * w, 4 * double(d.tokens()) * double(d.hidden)};
  }
  /// `condition` is the sum over the parts of their conditions times sqrt(terms), as cpu_ref::condition() measures it;
  /// what the norm and the product make may be rounded to the output's dtype.
  static Budget budget(const Dims&, Precision p, Condition c = {}) {
    const double stores = 2 * unit_roundoff(p.output);
    return reduction_budget(1, p, c) += {stores, stores};
  }

  /// The op as its parts: calls f with the Args of RmsLinear and RopeAppend in turn, with w (tokens, heads +
  /// 2 * kv_heads, 1, head_dim) in the given tensor, and stops at the first Status that is not ok.
  template <class F>
  static Status for_each_part(const Args& a, const AnyView<4>& w, F&& f) {
    const Dims d = dims(a);
    CF_TRY(f(RmsLinear::Args{
        .x = a.x, .gamma = a.gamma, .linear = a.linear, .y = reshape<2>(w, {d.tokens(), d.out()}), .eps = a.eps}));
    return f(RopeAppend::Args{.qkv = w,
                              .cos = a.cos,
                              .sin = a.sin,
                              .positions = a.positions,
                              .kv_len = a.kv_len,
                              .q = a.q,
                              .k_cache = a.k_cache,
                              .v_cache = a.v_cache,
                              .layout = QkvLayout::separate,
                              .runs = a.runs,
                              .page_table = a.page_table});
  }
  /// The inverse of for_each_part. `rope` reads what `linear` makes, which has no epilogue.
  static Args of_parts(const RmsLinear::Args& linear, const RopeAppend::Args& rope) {
    return {.x = linear.x,
            .gamma = linear.gamma,
            .linear = linear.linear,
            .cos = rope.cos,
            .sin = rope.sin,
            .positions = rope.positions,
            .kv_len = rope.kv_len,
            .q = rope.q,
            .k_cache = rope.k_cache,
            .v_cache = rope.v_cache,
            .eps = linear.eps,
            .runs = rope.runs,
            .page_table = rope.page_table};
  }
};

}  // namespace cf::ops
