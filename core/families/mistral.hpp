#pragma once
#include "core/families/llama.hpp"

/// Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's layer, with a window. Source: transformers' MistralConfig and
/// MistralModel.
namespace cf::families::mistral {

using enum ConfigKey;
using enum FieldUse;
inline constexpr auto kFields = joined(
    llama::kCommonFields, std::array{ConfigField{"num_key_value_heads", num_key_value_heads, read, 8},
                                     ConfigField{"max_position_embeddings", max_position_embeddings, read, 131072},
                                     ConfigField{"sliding_window", sliding_window, read, 4096},
                                     ConfigField{"attention_bias", attention_bias, noted, false},
                                     ConfigField{"mlp_bias", mlp_bias, noted, false}});

inline constexpr FamilySpec kFamily = llama::family("mistral", "MistralForCausalLM", kFields);

}  // namespace cf::families::mistral
