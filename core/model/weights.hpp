#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/model/shape.hpp"
#include "core/model/site.hpp"
#include "core/tensor_spec.hpp"
#include "core/weights.hpp"

namespace cf {

/// One GPT-NeoX layer's parameters, named after Hugging Face's modules. The sizes are those that a rank holds.
struct LayerWeights {
  NormParams input_layernorm{};
  NormParams post_attention_layernorm{};
  LinearParams query_key_value{};  // (3 * heads * head_dim, hidden): each head's rows of q, then of k, then of v
  LinearParams dense{};            // (hidden, heads * head_dim)
  LinearParams dense_h_to_4h{};    // (intermediate, hidden)
  LinearParams dense_4h_to_h{};    // (hidden, intermediate)
};

/// A GPT-NeoX model's parameters.
struct ModelWeights {
  ConstAnyView<2> embed_in{};          // (vocab, hidden)
  std::vector<LayerWeights> layers{};  // num_layers
  NormParams final_layer_norm{};
  LinearParams embed_out{};  // (vocab, hidden), no bias; where the embeddings are tied, a view of embed_in
};

/// The rows and columns of a Linear's matrix, and whether the model gives it a bias.
struct LinearSize {
  std::int64_t out, in;
  bool has_bias;
};

/// Calls f(module, params, size) for every Linear of a layer, by Hugging Face's name below gpt_neox.layers.N, in the
/// order of the walk.
template <class W, class F>
void for_each_linear(const ModelSpec& m, W&& w, F&& f) {
  const ModelShape& s = m.shape;
  const ModelTraits& t = m.traits;
  f(site::query_key_value.name, w.query_key_value, LinearSize{s.qkv_size(), s.hidden_size, t.attention_bias});
  f(site::dense.name, w.dense, LinearSize{s.hidden_size, s.attention_size(), t.attention_bias});
  f(site::dense_h_to_4h.name, w.dense_h_to_4h, LinearSize{s.intermediate_size, s.hidden_size, t.mlp_bias});
  f(site::dense_4h_to_h.name, w.dense_4h_to_h, LinearSize{s.hidden_size, s.intermediate_size, t.mlp_bias});
}

/// Calls f(spec, view, shape) for every weight of a layer, by the same names: the one list that loaders, generators and
/// dumps read.
template <class W, class F>
void for_each_weight(const ModelSpec& m, W& w, F&& f) {
  const auto norm = [&](std::string_view gamma, std::string_view beta, auto& n) {
    f(TensorSpec{Role::gain, gamma}, n.gamma, extents(m.shape.hidden_size));
    f(TensorSpec{Role::weight, beta}, n.beta, extents(m.shape.hidden_size));
  };
  norm("input_layernorm.weight", "input_layernorm.bias", w.input_layernorm);
  norm("post_attention_layernorm.weight", "post_attention_layernorm.bias", w.post_attention_layernorm);
  for_each_linear(m, w, [&](std::string_view module, auto& l, const LinearSize& size) {
    const std::string prefix = std::string(module) + ".", weight = prefix + "weight", bias = prefix + "bias";
    if (auto* dense = std::get_if<DenseWeight>(&l.weight))
      f(TensorSpec{Role::weight, weight}, dense->weight, extents(size.out, size.in));
    if (auto* gptq = std::get_if<GptqWeight>(&l.weight))
      for_each_gptq_tensor(*gptq, size.out, size.in, [&](const TensorSpec& part, auto& view, auto shape) {
        const std::string name = prefix + std::string(part.name);
        f(TensorSpec{part.role, name}, view, shape);
      });
    if (size.has_bias) f(TensorSpec{Role::weight, bias}, l.bias, extents(size.out));
  });
}

/// Calls f(spec, view, shape) for every tensor of a model, by Hugging Face's names, from "gpt_neox.embed_in.weight" to
/// "embed_out.weight". Tied embeddings are one tensor, "gpt_neox.embed_in.weight"; tie_embeddings() gives its view to
/// embed_out.
template <class W, class F>
void for_each_model_weight(const ModelSpec& m, W& w, F&& f) {
  const ModelShape& s = m.shape;
  f(TensorSpec{Role::weight, "gpt_neox.embed_in.weight"}, w.embed_in, extents(s.vocab_size, s.hidden_size));
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    const std::string prefix = "gpt_neox.layers." + std::to_string(i) + ".";
    for_each_weight(m, w.layers[i], [&](const TensorSpec& t, auto& view, auto shape) {
      const std::string name = prefix + std::string(t.name);
      f(TensorSpec{t.role, name}, view, shape);
    });
  }
  f(TensorSpec{Role::gain, "gpt_neox.final_layer_norm.weight"}, w.final_layer_norm.gamma, extents(s.hidden_size));
  f(TensorSpec{Role::weight, "gpt_neox.final_layer_norm.bias"}, w.final_layer_norm.beta, extents(s.hidden_size));
  if (m.traits.tied_embeddings) return;
  if (auto* dense = std::get_if<DenseWeight>(&w.embed_out.weight))
    f(TensorSpec{Role::weight, "embed_out.weight"}, dense->weight, extents(s.vocab_size, s.hidden_size));
}

/// The bytes of all tensors of a model, by their shapes and dtypes.
inline std::int64_t weight_bytes(const ModelSpec& m, const ModelWeights& w) {
  std::int64_t sum = 0;
  for_each_model_weight(m, w, [&](const TensorSpec&, const auto& view, const auto&) { sum += view.bytes(); });
  return sum;
}

/// Where the embeddings are tied, makes embed_out a view of embed_in.
inline void tie_embeddings(const ModelSpec& m, ModelWeights& w) {
  if (m.traits.tied_embeddings) w.embed_out = {.weight = DenseWeight{w.embed_in}};
}

}  // namespace cf
