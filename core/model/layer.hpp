#pragma once
#include <array>
#include <span>
#include <string>
#include <string_view>

#include "core/model/names.hpp"
#include "core/model/shape.hpp"
#include "core/model/weights.hpp"
#include "core/model/workload.hpp"
#include "core/ops/attention.hpp"
#include "core/ops/kv_append.hpp"
#include "core/ops/layernorm.hpp"
#include "core/ops/linear.hpp"
#include "core/ops/qk_norm.hpp"
#include "core/ops/rmsnorm.hpp"
#include "core/ops/rope.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf {

/// The keys and values of one layer, K after RoPE, as transformers' caches hold them.
struct LayerCache {
  AnyView<4> k{}, v{};  // (batch, kv_heads, capacity, head_dim), or of pages
};

/// Every tensor of one layer's step: what comes in, the cache, what each site makes, and the result.
struct LayerTensors {
  ConstAnyView<2> hidden{};                 // (tokens, hidden)
  View<const std::int32_t, 1> positions{};  // (tokens)  rows of cos and sin
  View<const std::int32_t, 1> kv_len{};     // (batch)   valid entries after the append; kIdleLength where idle
  View<const float, 2> cos{}, sin{};        // (table_rows, rotary_dim / 2), or empty without RoPE
  AnyView<4> k_cache{}, v_cache{};          // (batch, kv_heads, capacity, head_dim), or of pages
  AnyView<2> attn_in{};                     // (tokens, hidden)               input_layernorm
  AnyView<4> qkv{};                         // (tokens, heads, 3, head_dim), or as the qkv_layout says
  AnyView<4> qkv_normed{};                  // the same of qk_norm, or empty where heads have no norm
  AnyView<3> q{};                           // (tokens, heads, head_dim)      attention.rotary_emb
  AnyView<3> k{}, v{};                      // (tokens, kv_heads, head_dim)   the same
  AnyView<3> context{};                     // (tokens, heads, head_dim)      attention.context
  AnyView<2> attn_residual{};               // (tokens, hidden)               hidden + attention.dense
  AnyView<2> mlp_in{};                      // (tokens, hidden)               post_attention_layernorm
  AnyView<2> mlp_act{};                     // (tokens, intermediate)         GELU or SwiGLU of the MLP's first product
  AnyView<2> output{};                      // (tokens, hidden)
  std::int64_t max_kv_len = 0;              // at least the largest kv_len[b]
  /// Which rows are which sequence's; none: as many of each sequence, in order.
  RowRuns runs{};
  View<const std::int32_t, 2> page_table{};  // (batch, pages of a sequence), or empty: a contiguous cache
  /// Of a stream: what its newest row sees. Without one rows see what the model's own window says.
  KeyWindow stream{};
  View<const std::int32_t, 1> sink_positions{};  // (tokens)  rows of cos and sin for q_sinks
  AnyView<3> q_sinks{};                          // (tokens, heads, head_dim)  q for the sinks of a stream
};

/// The sizes that the shapes of a step's tensors are made of, beside those of the model.
struct StepSizes {
  std::int64_t batch = 1, q_len = 1;
  std::int64_t table_rows = 0;  // rows of the RoPE table: more than the largest position that a step uses
  std::int64_t capacity = 0;    // entries that a sequence's cache has room for
  std::int64_t mixed = 0;       // tokens of all runs; 0: each sequence has q_len
  PageSizes pool{};             // the cache's pages; none: it is contiguous
  bool sinks = false;           // whether there is q_sinks
  std::int64_t tokens() const { return mixed ? mixed : batch * q_len; }
};

/// The sizes of a workload. The RoPE table has a row for each entry that the cache has room for, however many positions
/// the model has.
StepSizes step_sizes(const Workload& load);

/// Calls f(spec, t..., shape) for every tensor of one layer's step, in the order of LayerTensors. Each t has the
/// members of LayerTensors: it is a LayerTensors or a LayerState. With several t, f is given their members of one name
/// side by side.
template <class F, class... T>
void for_each_activation(const ModelShape& s, const StepSizes& n, F&& f, T&... t) {
  const std::int64_t tokens = n.tokens(), half = s.rotary_dim / 2;
  const auto rows = extents(tokens, s.hidden_size);
  const auto cache = cache_extents(n, s.num_kv_heads, s.head_dim);
  const auto heads = extents(tokens, s.num_heads, s.head_dim), kv_heads = extents(tokens, s.num_kv_heads, s.head_dim);
  f(TensorSpec{Role::input, "hidden"}, t.hidden..., rows);
  f(TensorSpec{Role::position, "positions"}, t.positions..., extents(tokens));
  f(TensorSpec{Role::length, "kv_len"}, t.kv_len..., extents(n.batch));
  if (half > 0) {
    f(TensorSpec{Role::cosine, "cos"}, t.cos..., extents(n.table_rows, half));
    f(TensorSpec{Role::sine, "sin"}, t.sin..., extents(n.table_rows, half));
  }
  f(TensorSpec{Role::state, "k_cache"}, t.k_cache..., cache);
  f(TensorSpec{Role::state, "v_cache"}, t.v_cache..., cache);
  if (n.pool) f(TensorSpec{Role::page_table, "page_table", true}, t.page_table..., page_table_extents(n));
  f(TensorSpec{Role::output, "attn_in"}, t.attn_in..., rows);
  f(TensorSpec{Role::output, "qkv"}, t.qkv..., s.qkv_heads().extents_of(tokens, s.head_dim));
  if (s.head_norm)
    f(TensorSpec{Role::output, "qkv_normed"}, t.qkv_normed..., s.qkv_heads().extents_of(tokens, s.head_dim));
  f(TensorSpec{Role::output, "q"}, t.q..., heads);
  f(TensorSpec{Role::output, "k"}, t.k..., kv_heads);
  f(TensorSpec{Role::output, "v"}, t.v..., kv_heads);
  if (n.sinks) {
    f(TensorSpec{Role::position, "sink_positions"}, t.sink_positions..., extents(tokens));
    f(TensorSpec{Role::output, "q_sinks"}, t.q_sinks..., heads);
  }
  f(TensorSpec{Role::output, "context"}, t.context..., heads);
  f(TensorSpec{Role::output, "attn_residual"}, t.attn_residual..., rows);
  f(TensorSpec{Role::output, "mlp_in"}, t.mlp_in..., rows);
  f(TensorSpec{Role::output, "mlp_act"}, t.mlp_act..., extents(tokens, s.intermediate_size));
  f(TensorSpec{Role::output, "output"}, t.output..., rows);
}

/// What the MLP's first product ends with.
constexpr ops::Epilogue epilogue_of(Activation a) {
  switch (a) {
    case Activation::gelu_erf: return ops::Epilogue::gelu_erf;
    case Activation::gelu_tanh: return ops::Epilogue::gelu_tanh;
    case Activation::swiglu: return ops::Epilogue::swiglu;
  }
  return ops::Epilogue::none;
}

/// Which keys the rows of a step see.
constexpr KeyWindow window_of(const ModelSpec& m, const LayerTensors& t) {
  return t.stream ? t.stream : KeyWindow{.keys = m.traits.window};
}

/// Calls f(site, args) for a model's norm of some rows.
template <class F>
Status visit_norm(const ModelTraits& traits, const Site& site, const ConstAnyView<2>& x, const NormParams& params,
                  const AnyView<2>& y, F&& f) {
  switch (traits.norm) {
    case NormKind::layernorm:
      return f(site, ops::LayerNorm::Args{.x = x, .norm = params, .y = y, .eps = traits.layer_norm_eps});
    case NormKind::rmsnorm:
      return f(site, ops::RmsNorm::Args{.x = x, .gamma = params.gamma, .y = y, .eps = traits.layer_norm_eps});
  }
  return Status::error(Code::unimplemented, "model: norm has no op");
}

/// A layer, once: calls f(site, args) for every site in order and stops at the first Status that is not ok.
///   parallel residual    out = x + attn(norm1(x)) + mlp(norm2(x))
///   sequential residual  h = x + attn(norm1(x)),  out = h + mlp(norm2(h))
/// The forms differ in what norm2 reads. Both sums are epilogues of products: attn_residual = x + attn(norm1(x)),
/// output = attn_residual + mlp(...).
/// Where ranks share a model, each walks its own part. With a parallel residual the ranks' outputs sum up to the
/// layer's. With a sequential residual, attn_residual must be summed over the ranks before post_attention_layernorm,
/// and the outputs again after the MLP.
/// Source: transformers GPTNeoXLayer.forward, LlamaDecoderLayer.forward, Qwen3DecoderLayer.forward, GPT2Block.forward.
template <class F>
Status for_each_site(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, F&& f) {
  const ModelTraits& traits = m.traits;
  const ModelNames& names = names_of(m);
  const std::int64_t tokens = t.hidden.shape[0];
  const AnyView<2> qkv_rows = reshape<2>(t.qkv, {tokens, m.shape.qkv_size()});
  const ConstAnyView<2> context_rows = reshape<2>(t.context, {tokens, m.shape.attention_size()});
  const bool parallel = traits.residual == Residual::parallel;
  const ConstAnyView<2> mlp_source = parallel ? t.hidden : ConstAnyView<2>(t.attn_residual);
  // A product whose result is summed over the ranks.
  const auto summed = [&](const ConstAnyView<2>& x, const LinearParams& linear, const AnyView<2>& y,
                          const ConstAnyView<2>& residual, bool adds_residual) {
    ops::Linear::Args args{.x = x, .linear = linear, .y = y};
    if (!m.adds_residual) args.linear.bias = {};
    if (adds_residual) {
      args.residual = residual;
      args.epilogue = ops::Epilogue::residual;
    }
    return args;
  };

  CF_TRY(visit_norm(traits, names.input_layernorm, t.hidden, w.input_layernorm, t.attn_in, f));
  CF_TRY(f(names.query_key_value, ops::Linear::Args{.x = t.attn_in, .linear = w.query_key_value, .y = qkv_rows}));
  if (m.shape.head_norm)
    CF_TRY(f(names.qk_norm, ops::QkNorm::Args{.qkv = t.qkv,
                                              .q_gamma = w.q_norm.gamma,
                                              .k_gamma = w.k_norm.gamma,
                                              .y = t.qkv_normed,
                                              .layout = m.shape.qkv_layout,
                                              .kv_heads = m.shape.num_kv_heads,
                                              .eps = traits.layer_norm_eps}));
  CF_TRY(f(names.rotary_emb, ops::Rope::Args{.qkv = m.shape.head_norm ? t.qkv_normed : t.qkv,
                                             .cos = t.cos,
                                             .sin = t.sin,
                                             .positions = t.positions,
                                             .q = t.q,
                                             .k = t.k,
                                             .v = t.v,
                                             .layout = m.shape.qkv_layout,
                                             .sink_positions = t.sink_positions,
                                             .q_sinks = t.q_sinks}));
  CF_TRY(f(names.kv_append, ops::KvAppend::Args{.k = t.k,
                                                .v = t.v,
                                                .kv_len = t.kv_len,
                                                .k_cache = t.k_cache,
                                                .v_cache = t.v_cache,
                                                .runs = t.runs,
                                                .page_table = t.page_table,
                                                .window = t.stream}));
  CF_TRY(f(names.context, ops::Attention::Args{.q = t.q,
                                               .k_cache = t.k_cache,
                                               .v_cache = t.v_cache,
                                               .kv_len = t.kv_len,
                                               .y = t.context,
                                               .scale = m.attention_scale(),
                                               .max_kv_len = t.max_kv_len,
                                               .runs = t.runs,
                                               .page_table = t.page_table,
                                               .window = window_of(m, t),
                                               .q_sinks = t.q_sinks}));
  CF_TRY(f(names.dense, summed(context_rows, w.dense, t.attn_residual, t.hidden, m.adds_residual)));
  CF_TRY(visit_norm(traits, names.post_attention_layernorm, mlp_source, w.post_attention_layernorm, t.mlp_in, f));
  CF_TRY(f(names.dense_h_to_4h,
           ops::Linear::Args{
               .x = t.mlp_in, .linear = w.dense_h_to_4h, .y = t.mlp_act, .epilogue = epilogue_of(traits.activation)}));
  // With a parallel residual attn_residual is this rank's own part of the sum.
  return f(names.dense_4h_to_h,
           summed(t.mlp_act, w.dense_4h_to_h, t.output, t.attn_residual, parallel || m.adds_residual));
}

/// Refuses a model that for_each_site does not walk: what ModelSpec::validate() refuses, and fewer key and value heads
/// than query heads where the product has them interleaved by head.
Status check_model(const ModelSpec& m);

/// The host memory of one layer's step: inputs, cache, every site's output. One dtype for all activations.
class LayerState {
 public:
  LayerState(const ModelSpec& m, const Workload& load, DType activation);
  /// The memory that its tensors take.
  static double bytes(const ModelSpec& m, const Workload& load, DType activation);

  /// Sets each sequence's kv_len (after the append), its tokens' positions (the last is kv_len - 1) and max_kv_len.
  void set_kv_len(std::span<const std::int32_t> kv_len);
  /// Fills cos and sin with the library's own table, where there is RoPE.
  void fill_rope_table(double theta, const ops::RopeScaling& scaling = {});
  /// Views of all tensors.
  LayerTensors tensors();

  // The tensors of LayerTensors.
  Tensor hidden, positions, kv_len, cos, sin, k_cache, v_cache;
  Tensor attn_in, qkv, qkv_normed, q, k, v, context, attn_residual, mlp_in, mlp_act, output;
  Tensor page_table, sink_positions, q_sinks;  // empty: neither pages nor a stream

 private:
  ModelShape shape_;
  StepSizes sizes_;
  std::int64_t max_kv_len_ = 0;
};

/// The rows that a step appended to a cache (batch, heads, capacity, head_dim): those at kv_len - q_len .. kv_len - 1
/// of each sequence, as (batch, heads, q_len, head_dim).
Tensor appended_rows(ConstAnyView<4> cache, View<const std::int32_t, 1> kv_len, std::int64_t q_len);

}  // namespace cf
