#pragma once
#include "core/ops/layernorm.hpp"
#include "core/ops/linear.hpp"
#include "core/row_runs.hpp"

namespace cf::ops {

/// LayerNorm and the QKV product of grouped-query attention, stored by head; neither RoPE nor a cache.
///   z = LayerNorm(x; norm)                                                (batch, q_len, hidden)
///   q[b,h,s,d] = sum_k z[b,s,k] * W[h * head_dim + d, k] + bias           h < heads
///   k[b,h,s,d] = the same with row (heads + h) * head_dim + d of W        h < kv_heads
///   v[b,h,s,d] = the same with row (heads + kv_heads + h) * head_dim + d
/// W is the query, key and value projections one below the other; z is not an output. For programs that call ops: no
/// model of this library uses it.
/// With runs x is (1, tokens, hidden), and a run's results lie behind those of the runs before it, as a call of its own
/// makes them: q of a run of `count` rows from row r on is (heads, count, head_dim), from element r * heads * head_dim
/// of q on; k and v likewise. The runs' sequences are not read.
/// Source: Ainslie et al. 2023 (arXiv:2305.13245); transformers' q_proj, k_proj and v_proj, as in LlamaAttention.
/// Refuses what LayerNorm and Linear refuse, heads that kv_heads do not divide, and runs that check_row_runs() refuses.
struct LnQkvHeads {
  static constexpr std::string_view name = "ln_qkv_heads";
  struct Dims {
    std::int64_t batch, q_len, hidden, heads, kv_heads, head_dim;
    WeightFormat weight{};
    std::int64_t mixed = 0;  // tokens of all runs; 0: each sequence has q_len
    std::int64_t tokens() const { return mixed ? mixed : batch * q_len; }
    std::int64_t out() const { return (heads + 2 * kv_heads) * head_dim; }
  };
  struct Args {
    using Op = LnQkvHeads;
    ConstAnyView<3> x{};    // (batch, q_len, hidden); with runs (1, tokens, hidden), and so are q, k and v
    NormParams norm{};      // gamma, beta: (hidden)
    LinearParams linear{};  // weight ((heads + 2 * kv_heads) * head_dim, hidden), bias or empty
    AnyView<4> q{};         // (batch, heads, q_len, head_dim)
    AnyView<4> k{}, v{};    // (batch, kv_heads, q_len, head_dim)
    double eps = 1e-5;
    /// Which rows are which sequence's; none: as many of each sequence, in order.
    RowRuns runs{};
  };

  static Dims dims(const Args& a) {
    const std::int64_t batch = a.runs.empty() ? a.x.shape[0] : std::int64_t(a.runs.size());
    const StepRows rows = step_rows(a.x.shape[0] * a.x.shape[1], batch, a.runs);
    return {rows.batch,
            a.runs.empty() ? a.x.shape[1] : rows.q_len,
            a.x.shape[2],
            a.q.shape[1],
            a.k.shape[1],
            a.q.shape[3],
            format_of(a.linear.weight),
            rows.mixed};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    const std::int64_t batch = d.mixed ? 1 : d.batch, rows = d.mixed ? d.mixed : d.q_len;
    f(TensorSpec{Role::input, "x"}, a.x, extents(batch, rows, d.hidden));
    LayerNorm::norm_tensors({d.tokens(), d.hidden}, a.norm, f);
    Linear::linear_tensors(d.out(), d.hidden, a.linear, f);
    f(TensorSpec{Role::output, "q"}, a.q, extents(batch, d.heads, rows, d.head_dim));
    f(TensorSpec{Role::output, "k"}, a.k, extents(batch, d.kv_heads, rows, d.head_dim));
    f(TensorSpec{Role::output, "v"}, a.v, extents(batch, d.kv_heads, rows, d.head_dim));
  }
  static Status check(const Args& a) {
    const Dims d = dims(a);
    CF_TRY(Linear::check_linear(name, d.out(), d.hidden, a.linear));
    CF_TRY(check_tensors<LnQkvHeads>(a));
    if (!a.runs.empty()) CF_TRY(check_row_runs(name, a.runs, std::nullopt, d.tokens()));
    if (!(a.eps > 0)) return bad_argument(name, "eps must be positive, got " + std::to_string(a.eps));
    return check_kv_heads(name, d.heads, d.kv_heads);
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double t = double(d.tokens()), h = double(d.hidden), out = double(d.out());
    return {d.weight.bytes(d.out(), d.hidden, weight) + (out + 2 * h) * double(size_bytes(weight)) +
                t * (h + out) * double(size_bytes(activation)),
            2 * t * out * h + 8 * t * h};
  }
  /// As for ln_qkv: `condition` is the sum over the parts of their conditions times sqrt(terms); z may be rounded to
  /// the output's dtype.
  static Budget budget(const Dims&, Precision p, Condition c = {}) {
    const double store = unit_roundoff(p.output);
    return reduction_budget(1, p, c) += {store, store};
  }

  /// A group's part of a call.
  static Args part_of(const Args& a, const RowGroup& group) {
    const Dims d = dims(a);
    const auto by_head = [&](const AnyView<4>& v, std::int64_t heads) {
      AnyView<4> part = v;
      part.data =
          static_cast<std::byte*>(v.data) + group.first_row * heads * d.head_dim * std::int64_t(size_bytes(v.dtype));
      part.shape = {group.sequences, heads, group.count, d.head_dim};
      return part;
    };
    Args part = a;
    part.x.data =
        static_cast<const std::byte*>(a.x.data) + group.first_row * d.hidden * std::int64_t(size_bytes(a.x.dtype));
    part.x.shape = {group.sequences, group.count, d.hidden};
    part.q = by_head(a.q, d.heads);
    part.k = by_head(a.k, d.kv_heads);
    part.v = by_head(a.v, d.kv_heads);
    part.runs = {};
    return part;
  }

  /// The op but for the order of its outputs: calls f with the Args of LayerNorm and Linear in turn, with z and w in
  /// the given tensors, and stops at the first Status that is not ok.
  template <class F>
  static Status for_each_part(const Args& a, const AnyView<2>& z, const AnyView<2>& w, F&& f) {
    const Dims d = dims(a);
    const ConstAnyView<2> x = reshape<2>(a.x, {d.tokens(), d.hidden});
    CF_TRY(f(LayerNorm::Args{.x = x, .norm = a.norm, .y = z, .eps = a.eps}));
    return f(Linear::Args{.x = z, .linear = a.linear, .y = w});
  }
};

}  // namespace cf::ops
