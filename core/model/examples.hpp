#pragma once
// Examples of every op's arguments, for tests and benchmarks. Contracts know neither models nor workloads.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/model/workload.hpp"
#include "core/ops/all.hpp"

namespace cf::ops {

/// The sizes of a call, with Args that hold its scalars and no tensors.
template <class Op>
using Example = std::pair<typename Op::Dims, typename Op::Args>;

namespace detail {
template <class Op>
using For = std::type_identity<Op>;
using Model = const ModelSpec&;
using Load = const Workload&;

inline Example<Embedding> make(For<Embedding>, Model m, Load w) {
  const bool learned = m.traits.positions == Positions::learned;
  return {{w.tokens(), m.shape.vocab_size, m.shape.hidden_size, learned ? m.shape.max_positions : 0}, {}};
}
template <class Norm>
requires std::is_base_of_v<NormContract<Norm>, Norm> Example<Norm> make(For<Norm>, Model m, Load w) {
  return {{w.tokens(), m.shape.hidden_size}, {.eps = m.traits.layer_norm_eps}};
}
/// The MLP's first product.
inline Example<Linear> make(For<Linear>, Model m, Load w) {
  const Epilogue epilogue = epilogue_of(m.traits.activation);
  return {{w.tokens(), m.shape.hidden_size, m.shape.intermediate_size, false, {}, rows_of_output(epilogue)},
          {.epilogue = epilogue}};
}
/// The logits of three ranks.
inline Example<AllGather> make(For<AllGather>, Model m, Load w) {
  return {{3, 3, w.tokens(), m.shape.hidden_size}, {.ranks = 3}};
}
/// The hidden states of three ranks.
inline Example<AllReduce> make(For<AllReduce>, Model m, Load w) {
  return {{3, 3, w.tokens(), m.shape.hidden_size}, {.ranks = 3}};
}
/// The layer's two products whose results are added to the hidden state.
inline Example<LinearSum> make(For<LinearSum>, Model m, Load w) {
  return {{w.tokens(), m.shape.attention_size(), m.shape.intermediate_size, m.shape.hidden_size}, {}};
}
/// The norm before the MLP, and the MLP's first product.
inline Example<RmsLinear> make(For<RmsLinear>, Model m, Load w) {
  const Epilogue epilogue = epilogue_of(m.traits.activation);
  return {{w.tokens(), m.shape.hidden_size, m.shape.intermediate_size, rows_of_output(epilogue)},
          {.epilogue = epilogue, .eps = m.traits.layer_norm_eps}};
}
/// The rotary_dim of ops that are never without RoPE.
constexpr std::int64_t turned(const ModelShape& s) { return std::max<std::int64_t>(2, s.rotary_dim); }

inline Example<RmsQkv> make(For<RmsQkv>, Model m, Load w) {
  const ModelShape& s = m.shape;
  return {{w.batch, w.q_len, s.hidden_size, s.num_heads, s.num_kv_heads, s.head_dim, turned(s), w.cache_capacity(),
           w.cache_capacity()},
          {.eps = m.traits.layer_norm_eps}};
}
inline Example<Rope> make(For<Rope>, Model m, Load w) {
  const ModelShape& s = m.shape;
  return {{w.tokens(), s.num_heads, s.num_kv_heads, s.head_dim, s.rotary_dim, w.cache_capacity(), s.qkv_layout},
          {.layout = s.qkv_layout}};
}
inline Example<QkNorm> make(For<QkNorm>, Model m, Load w) {
  const ModelShape& s = m.shape;
  return {{w.tokens(), s.num_heads, s.num_kv_heads, s.head_dim, s.qkv_layout},
          {.layout = s.qkv_layout, .kv_heads = s.num_kv_heads, .eps = m.traits.layer_norm_eps}};
}
inline Example<KvAppend> make(For<KvAppend>, Model m, Load w) {
  return {{w.batch, w.q_len, m.shape.num_kv_heads, m.shape.head_dim, w.cache_capacity()}, {}};
}
/// The last token of the first sequence; the two rows before it become entries with it.
inline Example<AppendRows> make(For<AppendRows>, Model m, Load w) {
  const std::int64_t last = w.kv_len - 1, copied = std::min<std::int64_t>(2, last);
  return {{w.cache_capacity(), m.shape.num_kv_heads, m.shape.head_dim, w.cache_capacity(), copied},
          {.rows = {.first = last - copied, .last = last}}};
}
inline Example<RopeAppend> make(For<RopeAppend>, Model m, Load w) {
  const ModelShape& s = m.shape;
  return {{w.batch, w.q_len, s.num_heads, s.num_kv_heads, s.head_dim, s.rotary_dim, w.cache_capacity(),
           w.cache_capacity(), s.qkv_layout},
          {.layout = s.qkv_layout}};
}
inline Example<LnQkv> make(For<LnQkv>, Model m, Load w) {
  return {{w.batch, w.q_len, m.shape.hidden_size, m.shape.num_heads, m.shape.head_dim, turned(m.shape),
           w.cache_capacity(), w.cache_capacity()},
          {.eps = m.traits.layer_norm_eps}};
}
inline Example<LnQkvHeads> make(For<LnQkvHeads>, Model m, Load w) {
  return {{w.batch, w.q_len, m.shape.hidden_size, m.shape.num_heads, m.shape.num_kv_heads, m.shape.head_dim},
          {.eps = m.traits.layer_norm_eps}};
}
inline Example<Attention> make(For<Attention>, Model m, Load w) {
  return {{w.batch, w.q_len, m.shape.num_heads, m.shape.num_kv_heads, m.shape.head_dim, w.cache_capacity(), w.kv_len},
          {.scale = m.attention_scale(), .max_kv_len = w.kv_len}};
}
inline Example<DecodeLayer> make(For<DecodeLayer>, Model m, Load w) {
  return {{m, step_sizes(w), w.kv_len}, {.model = m, .t = {.max_kv_len = w.kv_len}}};
}
}  // namespace detail

/// The example of an op for one layer of a model under a workload.
template <class Op>
Example<Op> example(const ModelSpec& m, const Workload& w) {
  return detail::make(std::type_identity<Op>{}, m, w);
}

}  // namespace cf::ops
