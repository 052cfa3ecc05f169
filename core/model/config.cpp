#include "core/model/config.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>

#include "core/model/weights.hpp"

namespace cf {
namespace {

template <class Extents>
std::int64_t product(const Extents& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t(1), std::multiplies<>());
}

ModelConfig pythia(const char* name, std::int64_t hidden, std::int64_t layers, std::int64_t heads, std::int64_t vocab) {
  return {.name = name,
          .hidden_size = hidden,
          .num_hidden_layers = layers,
          .num_attention_heads = heads,
          .intermediate_size = 4 * hidden,
          .vocab_size = vocab,
          .rotary_dim = hidden / heads / 4};
}

ModelConfig gated(ModelType type, const char* name, std::string_view dtype, std::int64_t hidden, std::int64_t layers,
                  std::int64_t heads, std::int64_t kv_heads, std::int64_t intermediate, std::int64_t vocab,
                  std::int64_t positions, double theta, double factor, double low, double high,
                  std::int64_t original_positions, bool tied, double eps) {
  ops::RopeScaling scaling;
  if (factor != 0)
    scaling = {.kind = ops::RopeScaling::Kind::llama3,
               .factor = factor,
               .low_freq_factor = low,
               .high_freq_factor = high,
               .original_max_positions = original_positions};
  return {.model_type = type,
          .name = name,
          .hidden_size = hidden,
          .num_hidden_layers = layers,
          .num_attention_heads = heads,
          .num_key_value_heads = kv_heads,
          .intermediate_size = intermediate,
          .vocab_size = vocab,
          .max_position_embeddings = positions,
          .rotary_dim = hidden / heads,
          .rope_theta = theta,
          .rope_scaling = scaling,
          .layer_norm_eps = eps,
          .use_parallel_residual = false,
          .attention_bias = type == ModelType::qwen2,
          .mlp_bias = false,
          .tie_word_embeddings = tied,
          .hidden_act = Activation::swiglu,
          .dtype = dtype_from_string(dtype).value()};
}

}  // namespace

std::string_view to_string(ModelType type) { return family_of(type).model_type; }

std::optional<ModelType> model_type_from_string(std::string_view name) {
  for (std::size_t type = 0; type < kFamilies.size(); ++type)
    if (name == kFamilies[type]->model_type) return ModelType(type);
  return std::nullopt;
}

ModelSpec ModelConfig::spec() const {
  return {.shape = {.hidden_size = hidden_size,
                    .num_layers = num_hidden_layers,
                    .num_heads = num_attention_heads,
                    .num_kv_heads = kv_heads(),
                    .head_dim = num_attention_heads > 0 ? head_dim() : 0,
                    .intermediate_size = intermediate_size,
                    .vocab_size = vocab_size,
                    .rotary_dim = rotary_dim,
                    .max_positions = max_position_embeddings,
                    .qkv_layout = family().qkv_layout},
          .traits = {.family = model_type,
                     .norm = family().norm,
                     .layer_norm_eps = layer_norm_eps,
                     .activation = hidden_act,
                     .residual = use_parallel_residual ? Residual::parallel : Residual::sequential,
                     .positions = family().positions,
                     .head_norm = family().head_norm,
                     .qkv_bias = attention_bias,
                     .dense_bias = attention_bias && family().dense_bias_as_qkv,
                     .mlp_bias = mlp_bias,
                     .tied_embeddings = tie_word_embeddings,
                     .window = sliding_window,
                     .rope_theta = rope_theta,
                     .rope_scaling = rope_scaling}};
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
  if (attention_head_dim == 0 && hidden_size % num_attention_heads)
    return refuse("num_attention_heads must divide hidden_size, got " + std::to_string(num_attention_heads) +
                  " heads and hidden_size " + std::to_string(hidden_size));
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32)
    return refuse("dtype must be float16, bfloat16 or float32, got " + std::string(to_string(dtype)));
  const bool neox = model_type == ModelType::gpt_neox;
  if (!neox) CF_TRY(check_sizes({{"num_key_value_heads", num_key_value_heads, 1 << 16}}));
  const auto has = [](bool bias) { return bias ? "one" : "none"; };
  if (neox && (num_key_value_heads || attention_head_dim || rope_scaling != ops::RopeScaling{}))
    return refuse("gpt_neox has no num_key_value_heads, head_dim and scaling of RoPE of its own, got one of them");
  if (neox == (hidden_act == Activation::swiglu))
    return refuse(std::string(to_string(model_type)) + " with hidden_act " + std::string(to_string(hidden_act)) +
                  " is not built");
  if (neox != mlp_bias && model_type != ModelType::llama)
    return refuse("expected " + std::string(has(neox)) + " of the MLP's biases in " +
                  std::string(to_string(model_type)) + ", got " + has(mlp_bias));
  if (const bool qwen = model_type == ModelType::qwen2;
      (qwen || model_type == ModelType::mistral) && attention_bias != qwen)
    return refuse("expected " + std::string(has(qwen)) + " of the attention's biases in " +
                  std::string(to_string(model_type)) + ", got " + has(attention_bias));
  if (sliding_window && model_type != ModelType::mistral && model_type != ModelType::qwen2)
    return refuse(std::string(to_string(model_type)) + " has no sliding_window, got " + std::to_string(sliding_window));
  if (!neox && use_parallel_residual)
    return refuse("a parallel residual of " + std::string(to_string(model_type)) + " is not built");
  const ModelSpec s = spec();
  CF_TRY(s.validate());
  if (!neox && rotary_dim != head_dim())
    return refuse("rotary_dim must be head_dim " + std::to_string(head_dim()) + " in " +
                  std::string(to_string(model_type)) + ", got " + std::to_string(rotary_dim));
  return {};
}

const std::vector<ModelConfig>& presets() {
  static const std::vector<ModelConfig> all = {
#define CF_PYTHIA(...) pythia(__VA_ARGS__),
#define CF_LLAMA(...) gated(ModelType::llama, __VA_ARGS__),
#define CF_QWEN2(...) gated(ModelType::qwen2, __VA_ARGS__),
#include "core/model/presets.def"
#undef CF_PYTHIA
#undef CF_LLAMA
#undef CF_QWEN2
  };
  return all;
}

const std::vector<ModelConfig>& pythia_presets() {
  static const std::vector<ModelConfig> found = [] {
    std::vector<ModelConfig> list;
    std::ranges::copy_if(presets(), std::back_inserter(list),
                         [](const ModelConfig& m) { return m.model_type == ModelType::gpt_neox; });
    return list;
  }();
  return found;
}

Result<ModelConfig> find_preset(std::string_view name) {
  std::string names;
  for (const ModelConfig& m : presets()) {
    if (m.name == name) return m;
    names += (names.empty() ? "" : ", ") + m.name;
  }
  return Status::error(Code::not_found, "preset '" + std::string(name) + "' is unknown; there are " + names);
}

}  // namespace cf
