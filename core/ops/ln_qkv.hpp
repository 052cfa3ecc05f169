#pragma once
#include "core/ops/kv_append.hpp"
#include "core/ops/layernorm.hpp"
#include "core/ops/linear.hpp"
#include "core/ops/rope.hpp"

namespace cf::ops {

/// LayerNorm, the QKV product, RoPE and the append to the cache in one op.
///   z = LayerNorm(x; norm)                                        (tokens, hidden)
///   w[t, h, c, :] = sum_k z[t,k] * W[(h * 3 + c) * head_dim + :, k] + bias, c = 0, 1, 2 for q, k, v
///   q, k, v = Rope(w),  k_cache and v_cache = KvAppend(k, v)
/// Rope and KvAppend define the rest. The rows of W are interleaved by head, as GPT-NeoX stores them. z and w are not
/// outputs.
/// Source: transformers' GPTNeoXLayer.input_layernorm and GPTNeoXAttention up to the attention itself.
/// Refuses what LayerNorm, Linear, Rope and KvAppend refuse.
struct LnQkv {
  static constexpr std::string_view name = "ln_qkv";
  struct Dims {
    std::int64_t batch, q_len, hidden, heads, head_dim, rotary_dim, table_rows, capacity;
    WeightFormat weight{};
    std::int64_t mixed = 0;  // tokens of all runs; 0: each sequence has q_len
    PageSizes pool{};        // the cache's pages; none: it is contiguous
    std::int64_t tokens() const { return mixed ? mixed : batch * q_len; }
    std::int64_t out() const { return 3 * heads * head_dim; }
  };
  struct Args {
    using Op = LnQkv;
    ConstAnyView<2> x{};                      // (tokens, hidden)
    NormParams norm{};                        // gamma, beta: (hidden)
    LinearParams linear{};                    // weight (heads * 3 * head_dim, hidden), bias or empty
    View<const float, 2> cos{}, sin{};        // (table_rows, rotary_dim / 2)
    View<const std::int32_t, 1> positions{};  // (tokens)
    View<const std::int32_t, 1> kv_len{};     // (batch)
    AnyView<3> q{}, k{}, v{};                 // (tokens, heads, head_dim)
    AnyView<4> k_cache{}, v_cache{};          // (batch, heads, capacity, head_dim), or of pages
    double eps = 1e-5;
    /// Which rows are which sequence's; none: as many of each sequence, in order.
    RowRuns runs{};
    View<const std::int32_t, 2> page_table{};  // (batch, pages of a sequence), or empty: a contiguous cache
  };

  static Dims dims(const Args& a) {
    const StepRows rows = step_rows(a.x.shape[0], a.kv_len.shape[0], a.runs);
    return {rows.batch,     rows.q_len,        a.x.shape[1],
            a.q.shape[1],   a.q.shape[2],      2 * a.cos.shape[1],
            a.cos.shape[0], cache_capacity(a), format_of(a.linear.weight),
            rows.mixed,     page_sizes(a)};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens(), d.hidden));
    LayerNorm::norm_tensors({d.tokens(), d.hidden}, a.norm, f);
    Linear::linear_tensors(d.out(), d.hidden, a.linear, f);
    Rope::table_tensors(d.table_rows, d.rotary_dim, a, f);
    f(TensorSpec{Role::position, "positions"}, a.positions, extents(d.tokens()));
    f(TensorSpec{Role::length, "kv_len"}, a.kv_len, extents(d.batch));
    f(TensorSpec{Role::output, "q"}, a.q, extents(d.tokens(), d.heads, d.head_dim));
    f(TensorSpec{Role::output, "k"}, a.k, extents(d.tokens(), d.heads, d.head_dim));
    f(TensorSpec{Role::output, "v"}, a.v, extents(d.tokens(), d.heads, d.head_dim));
    cache_tensors(Role::state, d, d.heads, d.head_dim, a, f);
  }
  static Status check(const Args& a) {
    const Dims d = dims(a);
    CF_TRY(Linear::check_linear(name, d.out(), d.hidden, a.linear));
    CF_TRY(check_tensors<LnQkv>(a));
    if (!(a.eps > 0)) return bad_argument(name, "eps must be positive, got " + std::to_string(a.eps));
    if (d.rotary_dim == 0) return bad_argument(name, "'cos' is null, expected RoPE's table");
    CF_TRY(Rope::check_rotary_dim(name, d.head_dim, d.rotary_dim));
    return KvAppend::check_rows(name, d, a.runs);
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double t = double(d.tokens()), h = double(d.hidden), out = double(d.out()),
                 s = double(size_bytes(activation));
    return {d.weight.bytes(d.out(), d.hidden, weight) + (out + 2 * h) * double(size_bytes(weight)) +
                t * (h + out * 5 / 3) * s + 4 * (t * double(d.rotary_dim + 1) + double(d.batch)),
            2 * t * out * h + 8 * t * h + 2 * t * out};
  }
  /// To first order each part passes on the relative error of its input and adds its own; z and w may be rounded to the
  /// output's dtype.
  /// `condition` is the sum over the parts of their conditions times sqrt(terms), as cpu_ref::condition() measures it.
  static Budget budget(const Dims&, Precision p, Condition c = {}) {
    const double stores = 2 * unit_roundoff(p.output);
    return reduction_budget(1, p, c) += {stores, stores};
  }

  /// The op as its parts: calls f with the Args of LayerNorm, Linear, Rope and KvAppend in turn, with z and w in the
  /// given tensors, and stops at the first Status that is not ok.
  template <class F>
  static Status for_each_part(const Args& a, const AnyView<2>& z, const AnyView<4>& w, F&& f) {
    const Dims d = dims(a);
    CF_TRY(f(LayerNorm::Args{.x = a.x, .norm = a.norm, .y = z, .eps = a.eps}));
    CF_TRY(f(Linear::Args{.x = z, .linear = a.linear, .y = reshape<2>(w, {d.tokens(), d.out()})}));
    CF_TRY(f(Rope::Args{.qkv = w, .cos = a.cos, .sin = a.sin, .positions = a.positions, .q = a.q, .k = a.k, .v = a.v}));
    return f(KvAppend::Args{.k = a.k,
                            .v = a.v,
                            .kv_len = a.kv_len,
                            .k_cache = a.k_cache,
                            .v_cache = a.v_cache,
                            .runs = a.runs,
                            .page_table = a.page_table});
  }
  /// The inverse of for_each_part. Each part reads what the part before it makes; `linear` has no epilogue.
  static Args of_parts(const LayerNorm::Args& norm, const Linear::Args& linear, const Rope::Args& rope,
                       const KvAppend::Args& append) {
    return {.x = norm.x,
            .norm = norm.norm,
            .linear = linear.linear,
            .cos = rope.cos,
            .sin = rope.sin,
            .positions = rope.positions,
            .kv_len = append.kv_len,
            .q = rope.q,
            .k = rope.k,
            .v = rope.v,
            .k_cache = append.k_cache,
            .v_cache = append.v_cache,
            .eps = norm.eps,
            .runs = append.runs,
            .page_table = append.page_table};
  }
};

}  // namespace cf::ops
