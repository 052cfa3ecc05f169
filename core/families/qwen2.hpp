#pragma once
#include "core/families/llama.hpp"

/// Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama's layer, with biases of q, k and v. Source: transformers' Qwen2Config
/// and Qwen2Model.
namespace cf::families::qwen2 {

using enum ConfigKey;
using enum FieldUse;

/// What Qwen3 reads as well.
inline constexpr auto kCommonFields = joined(
    llama::kCommonFields, std::array{ConfigField{"num_key_value_heads", num_key_value_heads, read, 32},
                                     ConfigField{"max_position_embeddings", max_position_embeddings, read, 32768},
                                     ConfigField{"sliding_window", sliding_window, read, 4096},
                                     ConfigField{"use_sliding_window", use_sliding_window, read, false},
                                     ConfigField{"max_window_layers", max_window_layers, read, 28},
                                     ConfigField{"mlp_bias", mlp_bias, noted, false}});

inline constexpr auto kFields =
    joined(kCommonFields, std::array{ConfigField{"attention_bias", attention_bias, noted, true}});

inline constexpr Preset kPresets[] = {{.name = "qwen2.5-7b",
                                       .dtype = DType::bf16,
                                       .hidden_size = 3584,
                                       .num_hidden_layers = 28,
                                       .num_attention_heads = 28,
                                       .num_key_value_heads = 4,
                                       .intermediate_size = 18944,
                                       .vocab_size = 152064,
                                       .max_position_embeddings = 32768,
                                       .rope_theta = 1e6,
                                       .layer_norm_eps = 1e-6}};

inline constexpr FamilySpec kFamily = [] {
  FamilySpec f = llama::family("qwen2", "Qwen2ForCausalLM", kFields, kPresets);
  f.dense_bias_as_qkv = false;
  return f;
}();

}  // namespace cf::families::qwen2
