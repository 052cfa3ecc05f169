#pragma once
// A small model's step on the host, as a program: every family, with tensors that have values.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/program.hpp"
#include "core/procedural.hpp"

namespace cf::test {

/// One small model of every model type that has a preset: the preset's arithmetic with two layers of little size. A
/// GPT-NeoX comes with both residuals.
inline std::vector<ModelConfig> small_models() {
  std::vector<ModelConfig> all;
  for (ModelConfig m : presets()) {
    const bool known = std::any_of(all.begin(), all.end(), [&](const auto& o) { return o.model_type == m.model_type; });
    if (known) continue;
    const bool grouped = m.kv_heads() < m.num_attention_heads, whole = m.rotary_dim == m.head_dim();
    m.hidden_size = 32;
    m.num_hidden_layers = 2;
    m.num_attention_heads = 4;
    m.num_key_value_heads = grouped ? 2 : m.num_key_value_heads ? 4 : 0;
    if (m.attention_head_dim) m.attention_head_dim = 8;
    if (m.rotary_dim) m.rotary_dim = whole ? 8 : 4;
    m.intermediate_size = 64;
    m.vocab_size = 40;
    m.max_position_embeddings = 512;
    m.name = std::string(to_string(m.model_type));
    all.push_back(m);
    if (!m.use_parallel_residual) continue;
    m.use_parallel_residual = false;
    m.name += ", sequential residual";
    all.push_back(m);
  }
  return all;
}

/// small_models(), with sizes that four ranks divide.
inline std::vector<ModelConfig> divisible_models() {
  std::vector<ModelConfig> all = small_models();
  for (ModelConfig& m : all) {
    m.hidden_size = 64;
    m.num_attention_heads = 8;
    if (m.num_key_value_heads) m.num_key_value_heads = m.num_key_value_heads == 2 ? 4 : 8;
    m.intermediate_size = 128;
    m.vocab_size = 64;
  }
  return all;
}

/// A step of a model whose tensors lie on the host: weights and caches are procedural, all else is zero. Steps of the
/// same arguments hold the same values.
class HostStep {
 public:
  HostStep(const ModelConfig& m, std::int64_t batch, std::int64_t q_len, DType activation, DType weight,
           WeightFormat linears)
      : HostStep(m.spec(), procedural_model(m.spec(), weight, 1, linears), batch, q_len, activation) {}
  /// The same with weights of any kind.
  HostStep(const ModelSpec& m, OwnedModelWeights w, std::int64_t batch, std::int64_t q_len, DType activation)
      : spec(m), weights(std::move(w)) {
    const std::int64_t tokens = batch * q_len, capacity = q_len + 5;
    for_each_activation(
        spec.shape, {.batch = batch, .q_len = q_len, .table_rows = capacity, .capacity = capacity},
        [&](const TensorSpec&, auto& view, const auto& shape) { add(view, shape, activation); }, tensors.layer);
    for (AnyView<2>& h : tensors.hidden) add(h, extents(tokens, spec.shape.hidden_size), activation);
    add(tensors.final_norm, extents(tokens, spec.shape.hidden_size), activation);
    add(tensors.logits, extents(tokens, spec.shape.vocab_size), activation);
    add(tensors.ids, extents(tokens), DType::i32);
    for (std::int64_t i = 0; i < spec.shape.num_layers; ++i) {
      LayerCache cache{tensors.layer.k_cache, tensors.layer.v_cache};
      for (AnyView<4>* view : {&cache.k, &cache.v}) {
        add(*view, view->shape, activation);
        fill_procedural(view->data, activation, 0, view->size(), ProceduralKind::activation, 1, "cache");
      }
      caches.push_back(cache);
    }
    tensors.caches = caches;
    tensors.layer.max_kv_len = capacity;
    const auto set = [](const auto& view, std::int64_t i, std::int64_t value) {
      const_cast<std::int32_t*>(view.data)[i] = std::int32_t(value);
    };
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int64_t length = capacity - b % 3;
      set(tensors.layer.kv_len, b, length);
      for (std::int64_t i = 0; i < q_len; ++i) {
        set(tensors.layer.positions, b * q_len + i, length - q_len + i);
        set(tensors.ids, b * q_len + i, (7 * i + b) % spec.shape.vocab_size);
      }
    }
    const auto table = [](View<const float, 2> v) { return View<float, 2>{const_cast<float*>(v.data), v.shape}; };
    if (spec.shape.rotary_dim)
      ops::rope_table(table(tensors.layer.cos), table(tensors.layer.sin), spec.traits.rope_theta,
                      spec.traits.rope_scaling);
  }
  HostStep(const HostStep&) = delete;
  HostStep& operator=(const HostStep&) = delete;

  Result<Program> record() const { return record_model(spec, weights.weights, tensors); }

  ModelSpec spec;
  OwnedModelWeights weights;
  ModelTensors tensors;
  std::vector<LayerCache> caches;

 private:
  template <class V, class Extents>
  void add(V& view, const Extents& shape, DType activation) {
    Tensor t(dtype_of_view<V>(activation), Shape(shape.begin(), shape.end()));
    std::memset(t.data(), 0, std::size_t(t.size_bytes()));
    point(view, t.data(), shape, t.dtype());
    storage_.push_back(std::move(t));  // a moved tensor keeps its memory
  }

  std::vector<Tensor> storage_;
};

}  // namespace cf::test
