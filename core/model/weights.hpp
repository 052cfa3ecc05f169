#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/model/names.hpp"
#include "core/model/shape.hpp"
#include "core/tensor.hpp"
#include "core/tensor_spec.hpp"
#include "core/weights.hpp"

namespace cf {

/// One layer's parameters, named after GPT-NeoX's modules. The sizes are those that a rank holds.
struct LayerWeights {
  NormParams input_layernorm{};
  NormParams post_attention_layernorm{};
  NormParams q_norm{}, k_norm{};   // gamma of head_dim; none without head_norm
  LinearParams query_key_value{};  // ((heads + 2 * kv_heads) * head_dim, hidden), in the order of the qkv_layout
  LinearParams dense{};            // (hidden, heads * head_dim)
  LinearParams dense_h_to_4h{};    // (intermediate, hidden); with SwiGLU twice the rows, gate's and up's in turn
  LinearParams dense_4h_to_h{};    // (hidden, intermediate)
};

/// A model's parameters.
struct ModelWeights {
  ConstAnyView<2> embed_in{};          // (vocab, hidden)
  ConstAnyView<2> embed_positions{};   // (max_positions, hidden); none but with learned positions
  std::vector<LayerWeights> layers{};  // num_layers
  NormParams final_layer_norm{};
  LinearParams embed_out{};  // (vocab, hidden), no bias; where the embeddings are tied, a view of embed_in
};

/// One layer's weights in memory of its own.
struct OwnedLayerWeights {
  LayerWeights weights;
  std::vector<Tensor> storage;
};

/// A whole model's weights in memory of its own.
struct OwnedModelWeights {
  ModelWeights weights;
  std::vector<Tensor> storage;
};

/// The rows and columns of a Linear's matrix, and whether the model gives it a bias.
struct LinearSize {
  std::int64_t out, in;
  bool has_bias;
};

/// A module that a checkpoint stores of a Linear, and its rows.
struct StoredPart {
  std::string_view module;
  std::int64_t rows;
};

/// What a checkpoint stores of a layer's Linear: the Linear itself, or several modules.
struct StoredParts {
  std::vector<StoredPart> parts;
  bool interleaved = false;  // row i of every part in turn; otherwise the parts lie one below the other
  bool transposed = false;   // dense weights of the parts are (in, rows)

  /// Whether the parts are the Linear's own tensors.
  bool is_whole() const { return parts.size() == 1 && !transposed; }

  /// Where row `row` of part `part` lies in the Linear.
  std::int64_t joined_row(std::size_t part, std::int64_t row) const {
    if (interleaved) return row * std::int64_t(parts.size()) + std::int64_t(part);
    for (std::size_t before = 0; before < part; ++before) row += parts[before].rows;
    return row;
  }
};

inline StoredParts stored_parts(const ModelSpec& m, const Site& site, const LinearSize& size) {
  StoredParts found;
  for (const StoredLinear& stored : family_of(m).stored) {
    if (stored.site != site.id) continue;
    found.interleaved = stored.interleaved;
    found.transposed = stored.transposed;
    const bool is_qkv = site.id == SiteId::query_key_value;
    const std::int64_t kv_rows = m.shape.num_kv_heads * m.shape.head_dim;
    for (std::string_view part : stored.parts) {
      const bool is_q = found.parts.empty();
      const std::int64_t rows = !is_qkv ? size.out / std::int64_t(stored.parts.size())
                                : is_q  ? m.shape.attention_size()
                                        : kv_rows;
      found.parts.push_back({part, rows});
    }
  }
  if (found.parts.empty()) found.parts = {{site.name, size.out}};
  return found;
}

/// Calls f(site, params, size) for every Linear of a layer, in the order of the walk.
template <class W, class F>
void for_each_linear(const ModelSpec& m, W&& w, F&& f) {
  const ModelShape& s = m.shape;
  const ModelTraits& t = m.traits;
  const ModelNames& n = names_of(m);
  f(n.query_key_value, w.query_key_value, LinearSize{s.qkv_size(), s.hidden_size, t.qkv_bias});
  f(n.dense, w.dense, LinearSize{s.hidden_size, s.attention_size(), t.dense_bias});
  f(n.dense_h_to_4h, w.dense_h_to_4h, LinearSize{m.mlp_rows(), s.hidden_size, t.mlp_bias});
  f(n.dense_4h_to_h, w.dense_4h_to_h, LinearSize{s.hidden_size, s.intermediate_size, t.mlp_bias});
}

/// Calls f(spec, view, shape) for the weights of a norm of `size` elements, below its module's name.
template <class N, class F>
void for_each_norm_weight(const Site& site, NormKind kind, std::int64_t size, N& norm, F&& f) {
  const std::string gamma = std::string(site.name) + ".weight", beta = std::string(site.name) + ".bias";
  f(TensorSpec{Role::gain, gamma}, norm.gamma, extents(size));
  if (kind == NormKind::layernorm) f(TensorSpec{Role::weight, beta}, norm.beta, extents(size));
}

/// Calls f(spec, view, shape) for every weight of a layer, by its name below the layer: the one list that loaders,
/// generators and dumps read.
template <class W, class F>
void for_each_weight(const ModelSpec& m, W& w, F&& f) {
  const ModelNames& n = names_of(m);
  for_each_norm_weight(n.input_layernorm, m.traits.norm, m.shape.hidden_size, w.input_layernorm, f);
  for_each_norm_weight(n.post_attention_layernorm, m.traits.norm, m.shape.hidden_size, w.post_attention_layernorm, f);
  if (m.shape.head_norm) {
    for_each_norm_weight(n.q_norm, NormKind::rmsnorm, m.shape.head_dim, w.q_norm, f);
    for_each_norm_weight(n.k_norm, NormKind::rmsnorm, m.shape.head_dim, w.k_norm, f);
  }
  for_each_linear(m, w, [&](const Site& site, auto& l, const LinearSize& size) {
    const std::string prefix = std::string(site.name) + ".", weight = prefix + "weight", bias = prefix + "bias";
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

/// Calls f(spec, view, shape) for every tensor of a model, by its family's names, from "gpt_neox.embed_in.weight" to
/// "embed_out.weight". Tied embeddings are one tensor, the first; tie_embeddings() gives its view to embed_out.
template <class W, class F>
void for_each_model_weight(const ModelSpec& m, W& w, F&& f) {
  const ModelShape& s = m.shape;
  const ModelNames& names = names_of(m);
  const std::string embedding = std::string(names.embed_in.name) + ".weight",
                    head = std::string(names.embed_out.name) + ".weight";
  f(TensorSpec{Role::weight, embedding}, w.embed_in, extents(s.vocab_size, s.hidden_size));
  if (m.traits.positions == Positions::learned) {
    const std::string positions = std::string(names.embed_positions.name) + ".weight";
    f(TensorSpec{Role::weight, positions}, w.embed_positions, extents(s.max_positions, s.hidden_size));
  }
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    const std::string prefix = names.layer(std::int64_t(i));
    for_each_weight(m, w.layers[i], [&](const TensorSpec& t, auto& view, auto shape) {
      const std::string name = prefix + std::string(t.name);
      f(TensorSpec{t.role, name}, view, shape);
    });
  }
  for_each_norm_weight(names.final_layer_norm, m.traits.norm, s.hidden_size, w.final_layer_norm, f);
  if (m.traits.tied_embeddings) return;
  if (auto* dense = std::get_if<DenseWeight>(&w.embed_out.weight))
    f(TensorSpec{Role::weight, head}, dense->weight, extents(s.vocab_size, s.hidden_size));
}

/// The bytes of all tensors of a model, by their shapes and dtypes.
inline std::int64_t weight_bytes(const ModelSpec& m, const ModelWeights& w) {
  std::int64_t sum = 0;
  for_each_model_weight(m, w, [&](const TensorSpec&, const auto& view, const auto&) { sum += view.bytes(); });
  return sum;
}

/// Calls f(packed) for every packed weight of a layer, which is no tensor of for_each_weight(): that of an fp8 Linear.
template <class F>
void for_each_packed(const ModelSpec& m, const LayerWeights& w, F&& f) {
  for_each_linear(m, w, [&](const Site&, const LinearParams& l, const LinearSize&) {
    if (const auto* packed = std::get_if<PackedWeight>(&l.weight)) f(*packed);
  });
}

/// The bytes that the codes, scales and orders of a model's quantised weights take.
inline std::int64_t packed_bytes(const ModelSpec& m, const ModelWeights& w) {
  std::int64_t sum = 0;
  for (const LayerWeights& layer : w.layers)
    for_each_packed(m, layer, [&](const PackedWeight& packed) { sum += packed.data.bytes(); });
  return sum;
}

/// Where the embeddings are tied, makes embed_out a view of embed_in.
inline void tie_embeddings(const ModelSpec& m, ModelWeights& w) {
  if (m.traits.tied_embeddings) w.embed_out = {.weight = DenseWeight{w.embed_in}};
}

}  // namespace cf
