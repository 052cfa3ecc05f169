#pragma once
#include "core/families/llama.hpp"

/// Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's layer, with a window. Source: transformers' MistralConfig and
/// MistralModel.
namespace cf::families::mistral {

inline constexpr FamilySpec kFamily{.model_type = "mistral",
                                    .class_name = "MistralForCausalLM",
                                    .names = llama::kNames,
                                    .stored = llama::kStored,
                                    .buffers = llama::kBuffers,
                                    .norm = NormKind::rmsnorm};

}  // namespace cf::families::mistral
