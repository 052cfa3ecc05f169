#pragma once
#include <span>

#include "core/contract.hpp"

namespace cf::ops {

/// How the rows of the query, key and value product are ordered.
///   interleaved_by_head  each head's rows of q, then of k, then of v: (tokens, heads, 3, head_dim), as GPT-NeoX has it
///   separate             all heads of q, then of k, then of v: (tokens, heads + 2 * kv_heads, 1, head_dim)
enum class QkvLayout : std::uint8_t { interleaved_by_head, separate };

/// The heads of q, k and v and how they lie in one token of the product.
struct QkvHeads {
  std::int64_t heads, kv_heads;
  QkvLayout layout = QkvLayout::interleaved_by_head;

  /// The product's shape for some tokens.
  constexpr std::array<std::int64_t, 4> extents_of(std::int64_t tokens, std::int64_t head_dim) const {
    if (layout == QkvLayout::separate) return {tokens, heads + 2 * kv_heads, 1, head_dim};
    return {tokens, heads, 3, head_dim};
  }
  /// The index of a head of q, k or v (part 0, 1 or 2) among a token's heads.
  constexpr std::int64_t index(int part, std::int64_t head) const {
    if (layout == QkvLayout::interleaved_by_head) return 3 * head + part;
    return part == 0 ? head : heads + (part - 1) * kv_heads + head;
  }
  /// Refuses kv heads that the layout cannot hold: interleaved by head each query head has its own.
  Status check(std::string_view op) const {
    CF_TRY(check_kv_heads(op, heads, kv_heads));
    if (layout == QkvLayout::separate || heads == kv_heads) return {};
    return bad_argument(op, "kv_heads must be heads " + std::to_string(heads) +
                                " where q, k and v are interleaved by head, got " + std::to_string(kv_heads));
  }
};

/// Splits the product into q, k and v, and rotates the first rotary_dim = 2R elements of each head of q
/// and k by the angles of the token's position (half rotation):
///   y[i]     = x[i] cos[p,i]     - x[i + R] sin[p,i]
///   y[i + R] = x[i + R] cos[p,i] + x[i] sin[p,i]         for i < R, p = positions[t];  y[j] = x[j] for j >= 2R.
/// Without a table, rotary_dim is 0 and nothing turns: the op parts the product into q, k and v.
/// With q_sinks the op makes q a second time, by the angles of rows sink_positions[t]: a stream's queries stand
/// elsewhere for its sinks (Attention).
/// The table is an argument: Hugging Face computes it in float32 whatever the model's dtype, and so does rope_table().
/// Source: Su et al. 2021 (arXiv:2104.09864); transformers' apply_rotary_pos_emb for GPT-NeoX and Llama.
/// Refuses rotary_dim > head_dim, heads that QkvHeads refuses, and positions outside the table where the host can read
/// them.
struct Rope {
  static constexpr std::string_view name = "rope";
  struct Dims {
    std::int64_t tokens, heads, kv_heads, head_dim, rotary_dim, table_rows;
    QkvLayout layout = QkvLayout::interleaved_by_head;
    bool sinks = false;  // whether there is q_sinks
    QkvHeads qkv() const { return {heads, kv_heads, layout}; }
  };
  struct Args {
    using Op = Rope;
    ConstAnyView<4> qkv{};                    // (tokens, heads, 3, head_dim), or as the layout says
    View<const float, 2> cos{}, sin{};        // (table_rows, rotary_dim / 2)
    View<const std::int32_t, 1> positions{};  // (tokens)
    AnyView<3> q{};                           // (tokens, heads, head_dim)
    AnyView<3> k{}, v{};                      // (tokens, kv_heads, head_dim)
    QkvLayout layout = QkvLayout::interleaved_by_head;
    View<const std::int32_t, 1> sink_positions{};  // (tokens), or empty without sinks
    AnyView<3> q_sinks{};                          // (tokens, heads, head_dim), or empty without sinks
  };

  static Dims dims(const Args& a) {
    const bool separate = a.layout == QkvLayout::separate;
    return {a.qkv.shape[0],
            separate ? a.q.shape[1] : a.qkv.shape[1],
            separate ? a.k.shape[1] : a.qkv.shape[1],
            a.qkv.shape[3],
            2 * a.cos.shape[1],
            a.cos.shape[0],
            a.layout,
            a.q_sinks || a.sink_positions};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "qkv"}, a.qkv, d.qkv().extents_of(d.tokens, d.head_dim));
    table_tensors(d.table_rows, d.rotary_dim, a, f);
    f(TensorSpec{Role::position, "positions"}, a.positions, extents(d.tokens));
    f(TensorSpec{Role::output, "q"}, a.q, extents(d.tokens, d.heads, d.head_dim));
    f(TensorSpec{Role::output, "k"}, a.k, extents(d.tokens, d.kv_heads, d.head_dim));
    f(TensorSpec{Role::output, "v"}, a.v, extents(d.tokens, d.kv_heads, d.head_dim));
    if (!d.sinks) return;
    f(TensorSpec{Role::position, "sink_positions"}, a.sink_positions, extents(d.tokens));
    f(TensorSpec{Role::output, "q_sinks"}, a.q_sinks, extents(d.tokens, d.heads, d.head_dim));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<Rope>(a));
    const Dims d = dims(a);
    CF_TRY(d.qkv().check(name));
    return check_rotary_dim(name, d.head_dim, d.rotary_dim);
  }
  static Cost cost(const Dims& d, DType activation, DType) {
    const double token_rows = double(d.tokens), q = token_rows * double(d.heads) * (d.sinks ? 2 : 1),
                 k = token_rows * double(d.kv_heads);
    return {2 * (q + 2 * k) * double(d.head_dim) * double(size_bytes(activation)) +
                4 * token_rows * double(d.rotary_dim + 1),
            (q + k) * double(d.rotary_dim) * 3};
  }
  static Budget budget(const Dims&, Precision p, Condition c = {}) { return reduction_budget(2, p, c); }

  /// Lists the table where there is one.
  template <class A, class F>
  static void table_tensors(std::int64_t rows, std::int64_t rotary_dim, A& a, F&& f) {
    if (rotary_dim == 0 && !a.cos && !a.sin) return;
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

/// How the frequencies of a longer context are made from those of the context that a model was first trained with.
/// Kind llama3 divides those by `factor` whose wavelength is above original_max_positions / low_freq_factor, and keeps
/// those with a wavelength below original_max_positions / high_freq_factor. Between the two
///   s = (original_max_positions / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor),
///   f = (1 - s) f / factor + s f.
/// Source: transformers' modeling_rope_utils, _compute_llama3_parameters.
struct RopeScaling {
  enum class Kind : std::uint8_t { none, llama3 };
  Kind kind = Kind::none;
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  std::int64_t original_max_positions = 0;

  bool operator==(const RopeScaling&) const = default;
};

/// Fills cos and sin, (rows, rotary_dim / 2) each, as Hugging Face's rotary embeddings do, in float32:
///   inv_freq[i] = 1 / theta^(2i / rotary_dim), then scaled;  angle = position * inv_freq[i].
void rope_table(View<float, 2> cos, View<float, 2> sin, double theta, const RopeScaling& scaling = {});

/// Fills row r of cos and sin for positions[r], of any size: the angle, its cosine and its sine are computed in double
/// from the same inv_freq, and rounded once. A distance of two rows is then the distance of their positions, however
/// large these are, as a stream needs it.
void rope_rows(View<float, 2> cos, View<float, 2> sin, std::span<const std::int64_t> positions, double theta,
               const RopeScaling& scaling = {});

}  // namespace cf::ops
