#pragma once
#include "core/ops/rope.hpp"

namespace cf::ops {

/// RMSNorm of each head of q and of k, with one gamma for all heads of q and one for those of k. v is copied.
///   y[t, h, i] = gamma[i] * x[t, h, i] / sqrt(mean_i(x[t, h, i]^2) + eps)
/// x and y are the query, key and value product in the given layout. The mean of squares is float32 or wider, whatever
/// the dtype; y is rounded once, after gamma.
/// Source: Dehghani et al. 2023 (arXiv:2302.05442); transformers' Qwen3Attention.q_norm and k_norm, which round before
/// gamma too.
/// Refuses eps <= 0, and heads that QkvHeads refuses.
struct QkNorm {
  static constexpr std::string_view name = "qk_norm";
  struct Dims {
    std::int64_t tokens, heads, kv_heads, head_dim;
    QkvLayout layout = QkvLayout::separate;
    QkvHeads qkv() const { return {heads, kv_heads, layout}; }
  };
  struct Args {
    using Op = QkNorm;
    ConstAnyView<4> qkv{};                 // (tokens, heads + 2 * kv_heads, 1, head_dim), or as the layout says
    ConstAnyView<1> q_gamma{}, k_gamma{};  // (head_dim)
    AnyView<4> y{};                        // the shape of qkv
    QkvLayout layout = QkvLayout::separate;
    std::int64_t kv_heads = 0;  // heads of k, and of v; interleaved by head there are as many as heads of q
    double eps = 1e-6;
  };

  static Dims dims(const Args& a) {
    const bool separate = a.layout == QkvLayout::separate;
    const std::int64_t rows = a.qkv.shape[1];
    return {a.qkv.shape[0], separate ? rows - 2 * a.kv_heads : rows, a.kv_heads, a.qkv.shape[3], a.layout};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "qkv"}, a.qkv, d.qkv().extents_of(d.tokens, d.head_dim));
    f(TensorSpec{Role::gain, "q_gamma"}, a.q_gamma, extents(d.head_dim));
    f(TensorSpec{Role::gain, "k_gamma"}, a.k_gamma, extents(d.head_dim));
    f(TensorSpec{Role::output, "y"}, a.y, d.qkv().extents_of(d.tokens, d.head_dim));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<QkNorm>(a));
    const Dims d = dims(a);
    if (a.kv_heads < 1 || d.heads < 1)
      return bad_argument(name, "kv_heads must be at least 1 and leave a head of q, got " + std::to_string(a.kv_heads) +
                                    " with " + std::to_string(a.qkv.shape[1]) + " rows of heads");
    CF_TRY(d.qkv().check(name));
    if (!(a.eps > 0)) return bad_argument(name, "eps must be positive, got " + std::to_string(a.eps));
    return {};
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double head = double(d.head_dim), tokens = double(d.tokens);
    return {2 * tokens * double(d.heads + 2 * d.kv_heads) * head * double(size_bytes(activation)) +
                2 * head * double(size_bytes(weight)),
            4 * tokens * double(d.heads + d.kv_heads) * head};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.head_dim, p, c); }
};

}  // namespace cf::ops
