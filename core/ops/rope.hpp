#pragma once
#include "core/contract.hpp"

namespace cf::ops {

/// Splits the interleaved projection into q, k and v, and rotates the first rotary_dim = 2R elements of each head of q
/// and k by the angles of the token's position (half rotation):
///   y[i]     = x[i] cos[p,i]     - x[i + R] sin[p,i]
///   y[i + R] = x[i + R] cos[p,i] + x[i] sin[p,i]         for i < R, p = positions[t];  y[j] = x[j] for j >= 2R.
/// The table is an argument: Hugging Face computes it in float32 whatever the model's dtype, and so does rope_table().
/// Source: Su et al. 2021 (arXiv:2104.09864); transformers' apply_rotary_pos_emb for GPT-NeoX.
/// Refuses rotary_dim > head_dim, and positions outside the table where the host can read them.
struct Rope {
  static constexpr std::string_view name = "rope";
  struct Dims {
    std::int64_t tokens, heads, head_dim, rotary_dim, table_rows;
  };
  struct Args {
    using Op = Rope;
    ConstAnyView<4> qkv{};                    // (tokens, heads, 3, head_dim)
    View<const float, 2> cos{}, sin{};        // (table_rows, rotary_dim / 2)
    View<const std::int32_t, 1> positions{};  // (tokens)
    AnyView<3> q{}, k{}, v{};                 // (tokens, heads, head_dim)
  };

  static Dims dims(const Args& a) {
    return {a.qkv.shape[0], a.qkv.shape[1], a.qkv.shape[3], 2 * a.cos.shape[1], a.cos.shape[0]};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "qkv"}, a.qkv, extents(d.tokens, d.heads, 3, d.head_dim));
    table_tensors(d.table_rows, d.rotary_dim, a, f);
    f(TensorSpec{Role::position, "positions"}, a.positions, extents(d.tokens));
    f(TensorSpec{Role::output, "q"}, a.q, extents(d.tokens, d.heads, d.head_dim));
    f(TensorSpec{Role::output, "k"}, a.k, extents(d.tokens, d.heads, d.head_dim));
    f(TensorSpec{Role::output, "v"}, a.v, extents(d.tokens, d.heads, d.head_dim));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<Rope>(a));
    const Dims d = dims(a);
    return check_rotary_dim(name, d.head_dim, d.rotary_dim);
  }
  static Cost cost(const Dims& d, DType activation, DType) {
    const double n = double(d.tokens) * double(d.heads), token_rows = double(d.tokens);
    return {6 * n * double(d.head_dim) * double(size_bytes(activation)) + 4 * token_rows * double(d.rotary_dim + 1),
            2 * n * double(d.rotary_dim) * 3};
  }
  static Budget budget(const Dims&, Precision p, Condition c = {}) { return reduction_budget(2, p, c); }

  template <class A, class F>
  static void table_tensors(std::int64_t rows, std::int64_t rotary_dim, A& a, F&& f) {
    f(TensorSpec{Role::cosine, "cos"}, a.cos, extents(rows, rotary_dim / 2));
    f(TensorSpec{Role::sine, "sin"}, a.sin, extents(rows, rotary_dim / 2));
  }
  /// Refuses a table that is wider than a head.
  static Status check_rotary_dim(std::string_view op, std::int64_t head_dim, std::int64_t rotary_dim) {
    if (rotary_dim <= head_dim) return {};
    return bad_argument(op, "rotary_dim must be at most head_dim " + std::to_string(head_dim) + ", got " +
                                std::to_string(rotary_dim) + " from the table's shape");
  }
};

/// Fills cos and sin, (rows, rotary_dim / 2) each, as Hugging Face's GPTNeoXRotaryEmbedding does, in float32:
///   inv_freq[i] = 1 / theta^(2i / rotary_dim),  angle = position * inv_freq[i].
void rope_table(View<float, 2> cos, View<float, 2> sin, double theta);

}  // namespace cf::ops
