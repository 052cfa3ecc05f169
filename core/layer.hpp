#pragma once
#include <array>
#include <span>
#include <string>
#include <string_view>

#include "core/model_config.hpp"
#include "core/ops/attention.hpp"
#include "core/ops/kv_append.hpp"
#include "core/ops/layernorm.hpp"
#include "core/ops/linear.hpp"
#include "core/ops/rope.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"

namespace cf {

/// A step of the layer: `name` is Hugging Face's module below gpt_neox.layers.N (or what its attention does between
/// modules), `tap` the name under which dumps hold what the step makes. A step with several outputs has one tap each,
/// "tap.output".
struct Site {
  std::string_view name;
  std::string_view tap;
};

namespace site {
inline constexpr Site input_layernorm{"input_layernorm", "input_layernorm"};
inline constexpr Site query_key_value{"attention.query_key_value", "attention.query_key_value"};
inline constexpr Site rotary_emb{"attention.rotary_emb", "attention.rotary_emb"};
inline constexpr Site kv_append{"attention.kv_append", "attention.kv_append"};
inline constexpr Site context{"attention.context", "attention.context"};
inline constexpr Site dense{"attention.dense", "attention.residual"};
inline constexpr Site post_attention_layernorm{"post_attention_layernorm", "post_attention_layernorm"};
inline constexpr Site dense_h_to_4h{"mlp.dense_h_to_4h", "mlp.act"};
inline constexpr Site dense_4h_to_h{"mlp.dense_4h_to_h", "output"};
}  // namespace site

/// The sites in the order of the walk.
inline constexpr std::array sites{
    site::input_layernorm, site::query_key_value,          site::rotary_emb,    site::kv_append,    site::context,
    site::dense,           site::post_attention_layernorm, site::dense_h_to_4h, site::dense_4h_to_h};

/// Every tensor of one layer's step: what comes in, the cache, what each site makes, and the result.
struct LayerTensors {
  ConstAnyView<2> hidden{};                 // (tokens, hidden)
  View<const std::int32_t, 1> positions{};  // (tokens)  rows of cos and sin
  View<const std::int32_t, 1> kv_len{};     // (batch)   valid entries after the append
  View<const float, 2> cos{}, sin{};        // (table_rows, rotary_dim / 2)
  AnyView<4> k_cache{}, v_cache{};          // (batch, heads, capacity, head_dim)
  AnyView<2> attn_in{};                     // (tokens, hidden)               input_layernorm
  AnyView<4> qkv{};                         // (tokens, heads, 3, head_dim)   attention.query_key_value
  AnyView<3> q{}, k{}, v{};                 // (tokens, heads, head_dim)      attention.rotary_emb
  AnyView<3> context{};                     // (tokens, heads, head_dim)      attention.context
  AnyView<2> attn_residual{};               // (tokens, hidden)               hidden + attention.dense
  AnyView<2> mlp_in{};                      // (tokens, hidden)               post_attention_layernorm
  AnyView<2> mlp_act{};                     // (tokens, intermediate)         GELU(mlp.dense_h_to_4h)
  AnyView<2> output{};                      // (tokens, hidden)
  std::int64_t max_kv_len = 0;              // no kv_len[b] is larger
};

/// The GPT-NeoX layer, once: calls f(site, args) for every site in order and stops at the first Status that is not ok.
///   parallel residual    out = x + attn(LN1(x)) + mlp(LN2(x))
///   sequential residual  h = x + attn(LN1(x)),  out = h + mlp(LN2(h))
/// The two differ only in what LN2 reads, since both sums ride on the products' residual epilogue.
/// Source: transformers GPTNeoXLayer.forward.
template <class F>
Status for_each_site(const ModelConfig& m, const LayerWeights& w, const LayerTensors& t, F&& f) {
  const std::int64_t tokens = t.hidden.shape[0], h = m.hidden_size;
  const AnyView<2> qkv_rows = reshape<2>(t.qkv, {tokens, 3 * h});
  const ConstAnyView<2> context_rows = reshape<2>(t.context, {tokens, h});
  const ConstAnyView<2> mlp_source = m.use_parallel_residual ? t.hidden : ConstAnyView<2>(t.attn_residual);
  const ops::Epilogue gelu = m.hidden_act == Activation::gelu_erf ? ops::Epilogue::gelu_erf : ops::Epilogue::gelu_tanh;

  CF_TRY(f(site::input_layernorm,
           ops::LayerNorm::Args{.x = t.hidden, .norm = w.input_layernorm, .y = t.attn_in, .eps = m.layer_norm_eps}));
  CF_TRY(f(site::query_key_value, ops::Linear::Args{.x = t.attn_in, .linear = w.query_key_value, .y = qkv_rows}));
  CF_TRY(f(site::rotary_emb,
           ops::Rope::Args{
               .qkv = t.qkv, .cos = t.cos, .sin = t.sin, .positions = t.positions, .q = t.q, .k = t.k, .v = t.v}));
  CF_TRY(f(site::kv_append,
           ops::KvAppend::Args{.k = t.k, .v = t.v, .kv_len = t.kv_len, .k_cache = t.k_cache, .v_cache = t.v_cache}));
  CF_TRY(f(site::context, ops::Attention::Args{.q = t.q,
                                               .k_cache = t.k_cache,
                                               .v_cache = t.v_cache,
                                               .kv_len = t.kv_len,
                                               .y = t.context,
                                               .scale = m.attention_scale(),
                                               .max_kv_len = t.max_kv_len}));
  CF_TRY(f(site::dense, ops::Linear::Args{.x = context_rows,
                                          .linear = w.dense,
                                          .residual = t.hidden,
                                          .y = t.attn_residual,
                                          .epilogue = ops::Epilogue::residual}));
  CF_TRY(f(site::post_attention_layernorm,
           ops::LayerNorm::Args{
               .x = mlp_source, .norm = w.post_attention_layernorm, .y = t.mlp_in, .eps = m.layer_norm_eps}));
  CF_TRY(f(site::dense_h_to_4h,
           ops::Linear::Args{.x = t.mlp_in, .linear = w.dense_h_to_4h, .y = t.mlp_act, .epilogue = gelu}));
  return f(site::dense_4h_to_h, ops::Linear::Args{.x = t.mlp_act,
                                                  .linear = w.dense_4h_to_h,
                                                  .residual = t.attn_residual,
                                                  .y = t.output,
                                                  .epilogue = ops::Epilogue::residual});
}

/// Calls f(module, params, out, in, has_bias) for every Linear of a layer, by Hugging Face's name below
/// gpt_neox.layers.N, in the order of the walk.
template <class W, class F>
void for_each_linear(const ModelConfig& m, W&& w, F&& f) {
  const std::int64_t h = m.hidden_size, i = m.intermediate_size;
  f(site::query_key_value.name, w.query_key_value, 3 * h, h, m.attention_bias);
  f(site::dense.name, w.dense, h, h, m.attention_bias);
  f(site::dense_h_to_4h.name, w.dense_h_to_4h, i, h, true);
  f(site::dense_4h_to_h.name, w.dense_4h_to_h, h, i, true);
}

/// Calls f(name, view, shape) for every weight of a layer, by the same names: the one list that loaders, generators and
/// dumps read. The name lives as long as the call.
template <class W, class F>
void for_each_weight(const ModelConfig& m, W& w, F&& f) {
  const auto norm = [&](const char* gamma, const char* beta, auto& n) {
    f(std::string_view(gamma), n.gamma, std::array{m.hidden_size});
    f(std::string_view(beta), n.beta, std::array{m.hidden_size});
  };
  norm("input_layernorm.weight", "input_layernorm.bias", w.input_layernorm);
  norm("post_attention_layernorm.weight", "post_attention_layernorm.bias", w.post_attention_layernorm);
  for_each_linear(m, w, [&](std::string_view module, auto& l, std::int64_t out, std::int64_t in, bool has_bias) {
    const std::string prefix = std::string(module) + ".";
    if (auto* dense = std::get_if<DenseWeight>(&l.weight)) f(prefix + "weight", dense->weight, std::array{out, in});
    if (auto* gptq = std::get_if<GptqWeight>(&l.weight))
      for_each_gptq_tensor(*gptq, out, in, [&](std::string_view part, auto& view, auto shape) {
        f(prefix + std::string(part), view, shape);
      });
    if (has_bias) f(prefix + "bias", l.bias, std::array{out});
  });
}

/// The host memory of one layer's step: inputs, cache, every site's output. One dtype for all activations.
class LayerState {
 public:
  LayerState(const ModelConfig& m, const Workload& load, DType activation);

  /// Sets each sequence's kv_len (after the append), its tokens' positions (the last is kv_len - 1) and max_kv_len.
  void set_kv_len(std::span<const std::int32_t> kv_len);
  /// Fills cos and sin with the library's own table.
  void fill_rope_table(double theta);
  /// Views of all tensors.
  LayerTensors tensors();

  Tensor hidden, positions, kv_len, cos, sin, k_cache, v_cache;
  Tensor attn_in, qkv, q, k, v, context, attn_residual, mlp_in, mlp_act, output;

 private:
  std::int64_t max_kv_len_ = 0;
};

/// The rows that a step appended to a cache (batch, heads, capacity, head_dim): those at kv_len - q_len .. kv_len - 1
/// of each sequence, as (batch, heads, q_len, head_dim).
Tensor appended_rows(ConstAnyView<4> cache, View<const std::int32_t, 1> kv_len, std::int64_t q_len);

}  // namespace cf
