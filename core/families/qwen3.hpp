#pragma once
#include "core/families/llama.hpp"

/// Qwen3, dense (arXiv:2505.09388): Llama's layer, with an RMSNorm of each head of q and of k before RoPE. Source:
/// transformers' Qwen3Config and Qwen3Model.
namespace cf::families::qwen3 {

constexpr ModelNames with_head_norms(ModelNames names) {
  names.qk_norm = {"self_attn.qk_norm", "self_attn.qk_norm", SiteId::qk_norm};
  names.q_norm = {"self_attn.q_norm", ""};
  names.k_norm = {"self_attn.k_norm", ""};
  return names;
}

using enum ConfigKey;
using enum FieldUse;

/// Llama's fields, with a head_dim that does not follow from other sizes.
constexpr auto with_head_dim(auto fields) {
  for (ConfigField& field : fields)
    if (field.key == ConfigKey::head_dim) field = {"head_dim", ConfigKey::head_dim, read, 128};
  return fields;
}

inline constexpr auto kFields =
    joined(with_head_dim(llama::kCommonFields),
           std::array{ConfigField{"num_key_value_heads", num_key_value_heads, read, 32},
                      ConfigField{"max_position_embeddings", max_position_embeddings, read, 32768},
                      ConfigField{"sliding_window", sliding_window, read, 4096},
                      ConfigField{"use_sliding_window", use_sliding_window, read, false},
                      ConfigField{"max_window_layers", max_window_layers, read, 28},
                      ConfigField{"attention_bias", attention_bias, read, false},
                      ConfigField{"mlp_bias", mlp_bias, noted, false}});

constexpr Preset preset(std::string_view name, std::int64_t hidden, std::int64_t layers, std::int64_t heads,
                        std::int64_t intermediate, bool tied) {
  return {.name = name,
          .dtype = DType::bf16,
          .hidden_size = hidden,
          .num_hidden_layers = layers,
          .num_attention_heads = heads,
          .num_key_value_heads = 8,
          .head_dim = 128,
          .intermediate_size = intermediate,
          .vocab_size = 151936,
          .max_position_embeddings = 40960,
          .rope_theta = 1e6,
          .tie_word_embeddings = tied};
}
inline constexpr Preset kPresets[] = {
    preset("qwen3-0.6b", 1024, 28, 16, 3072, true), preset("qwen3-1.7b", 2048, 28, 16, 6144, true),
    preset("qwen3-4b", 2560, 36, 32, 9728, true), preset("qwen3-8b", 4096, 36, 32, 12288, false)};

inline constexpr FamilySpec kFamily{.model_type = "qwen3",
                                    .class_name = "Qwen3ForCausalLM",
                                    .names = with_head_norms(llama::kNames),
                                    .stored = llama::kStored,
                                    .buffers = llama::kBuffers,
                                    .norm = NormKind::rmsnorm,
                                    .head_norm = true,
                                    .activations = llama::kActivations,
                                    .activation_module = "mlp.act_fn",
                                    .rope_types = llama::kRopeTypes,
                                    .fields = kFields,
                                    .presets = kPresets};

}  // namespace cf::families::qwen3
