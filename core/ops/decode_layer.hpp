#pragma once
#include "core/layer.hpp"

namespace cf::ops {

/// One whole layer for q_len new tokens of each sequence: for_each_site, every site's output left in its tensor.
/// With q_len = 1 it is a decode step, with more a prefill of the tokens at the end of each sequence.
/// Refuses what its sites refuse, and a config that does not describe a layer.
struct DecodeLayer {
  static constexpr std::string_view name = "decode_layer";
  struct Dims {
    std::int64_t tokens, batch, hidden, heads, head_dim, rotary_dim, intermediate, table_rows, capacity, max_kv_len;
    bool attention_bias;
    std::array<WeightFormat, 4> linears{};  // in the order of for_each_linear
  };
  struct Args {
    using Op = DecodeLayer;
    const ModelConfig* config = nullptr;
    LayerWeights weights{};
    LayerTensors t{};
  };

  static Dims dims(const Args& a) {
    const ModelConfig& m = *a.config;
    const LayerWeights& w = a.weights;
    return {a.t.hidden.shape[0],
            a.t.kv_len.shape[0],
            m.hidden_size,
            m.num_attention_heads,
            m.head_dim(),
            m.rotary_dim,
            m.intermediate_size,
            a.t.cos.shape[0],
            a.t.k_cache.shape[2],
            a.t.max_kv_len,
            m.attention_bias,
            {format_of(w.query_key_value.weight), format_of(w.dense.weight), format_of(w.dense_h_to_4h.weight),
             format_of(w.dense_4h_to_h.weight)}};
  }
  static std::pair<Dims, Args> example(const ModelConfig& m, const Workload& w) {
    return {{w.tokens(), w.batch, m.hidden_size, m.num_attention_heads, m.head_dim(), m.rotary_dim, m.intermediate_size,
             std::max(m.max_position_embeddings, w.kv_len), w.cache_capacity(), w.kv_len, m.attention_bias},
            {.config = &m, .t = {.max_kv_len = w.kv_len}}};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(Role::input, "hidden", a.t.hidden, extents(d.tokens, d.hidden));
    f(Role::index, "positions", a.t.positions, extents(d.tokens));
    f(Role::index, "kv_len", a.t.kv_len, extents(d.batch));
    Rope::table_tensors(d.table_rows, d.rotary_dim, a.t, f);
    f(Role::state, "k_cache", a.t.k_cache, extents(d.batch, d.heads, d.capacity, d.head_dim));
    f(Role::state, "v_cache", a.t.v_cache, extents(d.batch, d.heads, d.capacity, d.head_dim));
    for_each_weight(*a.config, a.weights, [&]<class V>(std::string_view name, V& v, auto shape) {
      f(std::is_void_v<std::remove_const_t<typename V::element>> ? Role::weight : Role::gptq, name, v, shape);
    });
    f(Role::output, "attn_in", a.t.attn_in, extents(d.tokens, d.hidden));
    f(Role::output, "qkv", a.t.qkv, extents(d.tokens, d.heads, 3, d.head_dim));
    f(Role::output, "q", a.t.q, extents(d.tokens, d.heads, d.head_dim));
    f(Role::output, "k", a.t.k, extents(d.tokens, d.heads, d.head_dim));
    f(Role::output, "v", a.t.v, extents(d.tokens, d.heads, d.head_dim));
    f(Role::output, "context", a.t.context, extents(d.tokens, d.heads, d.head_dim));
    f(Role::output, "attn_residual", a.t.attn_residual, extents(d.tokens, d.hidden));
    f(Role::output, "mlp_in", a.t.mlp_in, extents(d.tokens, d.hidden));
    f(Role::output, "mlp_act", a.t.mlp_act, extents(d.tokens, d.intermediate));
    f(Role::output, "output", a.t.output, extents(d.tokens, d.hidden));
  }
  static Status check(const Args& a) {
    if (!a.config) return bad_argument(name, "'config' is null, expected a ModelConfig");
    CF_TRY(a.config->validate());
    const std::int64_t h = a.config->hidden_size, i = a.config->intermediate_size;
    CF_TRY(Linear::check_linear(name, 3 * h, h, a.weights.query_key_value));
    CF_TRY(Linear::check_linear(name, h, h, a.weights.dense));
    CF_TRY(Linear::check_linear(name, i, h, a.weights.dense_h_to_4h));
    CF_TRY(Linear::check_linear(name, h, i, a.weights.dense_4h_to_h));
    return check_tensors<DecodeLayer>(a);
  }
  /// What a layer must move whatever its implementation: its weights, the cache, the hidden state in and out. What the
  /// sites hand each other is not compulsory.
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double h = double(d.hidden), i = double(d.intermediate), t = double(d.tokens),
                 s = double(size_bytes(activation));
    const std::int64_t q_len = d.tokens / d.batch;
    const Cost attention =
        Attention::cost({d.batch, q_len, d.heads, d.head_dim, d.capacity, d.max_kv_len}, activation, weight);
    const std::int64_t hidden = d.hidden, wide = d.intermediate;
    const double vectors = (d.attention_bias ? 4 * h : 0) + i + h + 4 * h;
    const double matrices_bytes = d.linears[0].bytes(3 * hidden, hidden, weight) +
                                  d.linears[1].bytes(hidden, hidden, weight) +
                                  d.linears[2].bytes(wide, hidden, weight) + d.linears[3].bytes(hidden, wide, weight);
    const double products = 4 * h * h + 2 * h * i;
    // The attention's cost counts its q and y; here the new keys and values are written instead, the same bytes.
    return {matrices_bytes + vectors * double(size_bytes(weight)) + attention.bytes + 2 * t * h * s,
            2 * t * products + attention.flops};
  }
  /// First order: every site passes on the relative error it is given and adds its own. `condition` is the sum over the
  /// sites of their reductions' conditions times sqrt(terms), as cpu_ref::condition() measures it.
  static Budget budget(const Dims&, Precision p, Condition c = {}) {
    Budget b = reduction_budget(1, p, c);
    const double stores = double(sites.size() - 1) * unit_roundoff(p.output);
    return b += {stores, stores};
  }
};

}  // namespace cf::ops
