#include "core/model_config.hpp"

#include <cmath>

namespace cf {

std::string_view to_string(Activation a) { return a == Activation::gelu_erf ? "gelu" : "gelu_pytorch_tanh"; }

double ModelConfig::attention_scale() const { return 1 / std::sqrt(double(head_dim())); }

std::int64_t ModelConfig::layer_parameters() const {
  const std::int64_t h = hidden_size, i = intermediate_size;
  return 4 * h * h + 2 * h * i + (attention_bias ? 4 * h : 0) + i + h + 4 * h;
}

std::int64_t ModelConfig::num_parameters() const {
  return 2 * vocab_size * hidden_size + num_hidden_layers * layer_parameters() + 2 * hidden_size;
}

Status ModelConfig::validate() const {
  const auto refuse = [](std::string what) { return Status::error(Code::invalid_argument, "model config: " + what); };
  struct Size {
    std::string_view name;
    std::int64_t value, most;
  };
  // The bounds keep every product of sizes far inside 64 bits.
  for (const Size& s :
       {Size{"hidden_size", hidden_size, 1 << 20}, Size{"num_hidden_layers", num_hidden_layers, 1 << 16},
        Size{"num_attention_heads", num_attention_heads, 1 << 16},
        Size{"intermediate_size", intermediate_size, 1 << 22}, Size{"vocab_size", vocab_size, 1 << 26},
        Size{"max_position_embeddings", max_position_embeddings, 1 << 26}})
    if (s.value < 1 || s.value > s.most)
      return refuse(std::string(s.name) + " must be 1 to " + std::to_string(s.most) + ", got " +
                    std::to_string(s.value));
  if (hidden_size % num_attention_heads)
    return refuse("num_attention_heads must divide hidden_size, got " + std::to_string(num_attention_heads) +
                  " heads and hidden_size " + std::to_string(hidden_size));
  if (rotary_dim < 2 || rotary_dim > head_dim() || rotary_dim % 2)
    return refuse("rotary_dim must be even, 2 to head_dim " + std::to_string(head_dim()) + ", got " +
                  std::to_string(rotary_dim));
  if (!(layer_norm_eps > 0) || !std::isfinite(layer_norm_eps))
    return refuse("layer_norm_eps must be positive, got " + std::to_string(layer_norm_eps));
  if (!(rope_theta > 0) || !std::isfinite(rope_theta))
    return refuse("rope_theta must be positive, got " + std::to_string(rope_theta));
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32)
    return refuse("dtype must be float16, bfloat16 or float32, got " + std::string(to_string(dtype)));
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

Result<ModelConfig> find_preset(std::string_view name) {
  std::string names;
  for (const ModelConfig& m : pythia_presets()) {
    if (m.name == name) return m;
    names += (names.empty() ? "" : ", ") + m.name;
  }
  return Status::error(Code::not_found, "preset '" + std::string(name) + "' is unknown; there are " + names);
}

}  // namespace cf
