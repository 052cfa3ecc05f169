#include "core/model/config.hpp"

#include <functional>
#include <numeric>

#include "core/model/weights.hpp"

namespace cf {
namespace {

template <class Extents>
std::int64_t product(const Extents& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t(1), std::multiplies<>());
}

}  // namespace

ModelSpec ModelConfig::spec() const {
  return {.shape = {.hidden_size = hidden_size,
                    .num_layers = num_hidden_layers,
                    .num_heads = num_attention_heads,
                    .num_kv_heads = num_attention_heads,
                    .head_dim = num_attention_heads > 0 ? head_dim() : 0,
                    .intermediate_size = intermediate_size,
                    .vocab_size = vocab_size,
                    .rotary_dim = rotary_dim,
                    .max_positions = max_position_embeddings},
          .traits = {.layer_norm_eps = layer_norm_eps,
                     .activation = hidden_act,
                     .residual = use_parallel_residual ? Residual::parallel : Residual::sequential,
                     .attention_bias = attention_bias,
                     .tied_embeddings = tie_word_embeddings,
                     .rope_theta = rope_theta}};
}

std::int64_t ModelConfig::layer_parameters() const {
  std::int64_t sum = 0;
  LayerWeights weights;
  for_each_weight(spec(), weights, [&](const TensorSpec&, const auto&, auto shape) { sum += product(shape); });
  return sum;
}

std::int64_t ModelConfig::num_parameters() const {
  std::int64_t sum = num_hidden_layers * layer_parameters();
  ModelWeights rest;
  for_each_model_weight(spec(), rest, [&](const TensorSpec&, const auto&, auto shape) { sum += product(shape); });
  return sum;
}

Status ModelConfig::validate() const {
  const auto refuse = [](std::string what) { return Status::error(Code::invalid_argument, "model: " + what); };
  // These messages name the sizes as config.json does; those of the spec have other names.
  CF_TRY(check_sizes({{"hidden_size", hidden_size, 1 << 20},
                      {"num_hidden_layers", num_hidden_layers, 1 << 16},
                      {"num_attention_heads", num_attention_heads, 1 << 16},
                      {"max_position_embeddings", max_position_embeddings, 1 << 26}}));
  if (hidden_size % num_attention_heads)
    return refuse("num_attention_heads must divide hidden_size, got " + std::to_string(num_attention_heads) +
                  " heads and hidden_size " + std::to_string(hidden_size));
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32)
    return refuse("dtype must be float16, bfloat16 or float32, got " + std::string(to_string(dtype)));
  return spec().validate();
}

const std::vector<ModelConfig>& pythia_presets() {
  static const std::vector<ModelConfig> presets = [] {
    const auto pythia = [](const char* name, int hidden, int layers, int heads, int vocab) {
      return ModelConfig{.name = name,
                         .hidden_size = hidden,
                         .num_hidden_layers = layers,
                         .num_attention_heads = heads,
                         .intermediate_size = 4 * hidden,
                         .vocab_size = vocab,
                         .rotary_dim = hidden / heads / 4};
    };
    return std::vector<ModelConfig>{
        pythia("pythia-14m", 128, 6, 4, 50304),     pythia("pythia-31m", 256, 6, 8, 50304),
        pythia("pythia-70m", 512, 6, 8, 50304),     pythia("pythia-160m", 768, 12, 12, 50304),
        pythia("pythia-410m", 1024, 24, 16, 50304), pythia("pythia-1b", 2048, 16, 8, 50304),
        pythia("pythia-1.4b", 2048, 24, 16, 50304), pythia("pythia-2.8b", 2560, 32, 32, 50304),
        pythia("pythia-6.9b", 4096, 32, 32, 50432), pythia("pythia-12b", 5120, 36, 40, 50688)};
  }();
  return presets;
}

Result<ModelConfig> find_preset(std::string_view name) {
  std::string names;
  for (const ModelConfig& m : pythia_presets()) {
    if (m.name == name) return m;
    names += (names.empty() ? "" : ", ") + m.name;
  }
  return Status::error(Code::not_found, "preset '" + std::string(name) + "' is unknown; there are " + names);
}

}  // namespace cf
