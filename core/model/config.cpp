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

std::string_view to_string(ModelType type) {
  switch (type) {
    case ModelType::gpt_neox: return "gpt_neox";
    case ModelType::llama: return "llama";
    case ModelType::mistral: return "mistral";
    case ModelType::qwen2: return "qwen2";
  }
  return "";
}

std::optional<ModelType> model_type_from_string(std::string_view name) {
  for (ModelType type : {ModelType::gpt_neox, ModelType::llama, ModelType::mistral, ModelType::qwen2})
    if (name == to_string(type)) return type;
  return std::nullopt;
}

ModelSpec ModelConfig::spec() const {
  const bool neox = family() == ModelFamily::gpt_neox;
  return {.shape = {.hidden_size = hidden_size,
                    .num_layers = num_hidden_layers,
                    .num_heads = num_attention_heads,
                    .num_kv_heads = kv_heads(),
                    .head_dim = num_attention_heads > 0 ? head_dim() : 0,
                    .intermediate_size = intermediate_size,
                    .vocab_size = vocab_size,
                    .rotary_dim = rotary_dim,
                    .max_positions = max_position_embeddings,
                    .qkv_layout = neox ? ops::QkvLayout::interleaved_by_head : ops::QkvLayout::separate},
          .traits = {.family = family(),
                     .norm = neox ? NormKind::layernorm : NormKind::rmsnorm,
                     .layer_norm_eps = layer_norm_eps,
                     .activation = hidden_act,
                     .residual = use_parallel_residual ? Residual::parallel : Residual::sequential,
                     .qkv_bias = attention_bias,
                     .dense_bias = attention_bias && model_type != ModelType::qwen2,
                     .mlp_bias = mlp_bias,
                     .tied_embeddings = tie_word_embeddings,
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
  const bool neox = family() == ModelFamily::gpt_neox;
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
  if (!neox && use_parallel_residual)
    return refuse("a parallel residual of " + std::string(to_string(model_type)) + " is not built");
  const ModelSpec s = spec();
  CF_TRY(s.validate());
  if (!neox && rotary_dim != head_dim())
    return refuse("rotary_dim must be head_dim " + std::to_string(head_dim()) + " in " +
                  std::string(to_string(model_type)) + ", got " + std::to_string(rotary_dim));
  return {};
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

const std::vector<ModelConfig>& presets() {
  static const std::vector<ModelConfig> all = [] {
    struct Sizes {
      std::int64_t hidden, layers, heads, kv_heads, intermediate, vocab, positions;
    };
    const auto llama = [](const char* name, ModelType type, const Sizes& s, double theta, bool tied, double eps) {
      return ModelConfig{.model_type = type,
                         .name = name,
                         .hidden_size = s.hidden,
                         .num_hidden_layers = s.layers,
                         .num_attention_heads = s.heads,
                         .num_key_value_heads = s.kv_heads,
                         .intermediate_size = s.intermediate,
                         .vocab_size = s.vocab,
                         .max_position_embeddings = s.positions,
                         .rotary_dim = s.hidden / s.heads,
                         .rope_theta = theta,
                         .layer_norm_eps = eps,
                         .use_parallel_residual = false,
                         .attention_bias = type == ModelType::qwen2,
                         .mlp_bias = false,
                         .tie_word_embeddings = tied,
                         .hidden_act = Activation::swiglu,
                         .dtype = DType::bf16};
    };
    const auto scaled = [](ModelConfig m, double factor) {
      m.rope_scaling = {.kind = ops::RopeScaling::Kind::llama3,
                        .factor = factor,
                        .low_freq_factor = 1,
                        .high_freq_factor = 4,
                        .original_max_positions = 8192};
      return m;
    };
    std::vector<ModelConfig> list = pythia_presets();
    constexpr ModelType l = ModelType::llama;
    list.push_back(llama("llama-2-7b", l, {4096, 32, 32, 32, 11008, 32000, 4096}, 1e4, false, 1e-5));
    list.back().dtype = DType::f16;
    list.push_back(scaled(llama("llama-3.2-1b", l, {2048, 16, 32, 8, 8192, 128256, 131072}, 5e5, true, 1e-5), 32));
    list.push_back(scaled(llama("llama-3.2-3b", l, {3072, 28, 24, 8, 8192, 128256, 131072}, 5e5, true, 1e-5), 32));
    list.push_back(scaled(llama("llama-3.1-8b", l, {4096, 32, 32, 8, 14336, 128256, 131072}, 5e5, false, 1e-5), 8));
    list.push_back(llama("qwen2.5-7b", ModelType::qwen2, {3584, 28, 28, 4, 18944, 152064, 32768}, 1e6, false, 1e-6));
    return list;
  }();
  return all;
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
