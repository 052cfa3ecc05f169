#pragma once
#include "core/families/llama.hpp"

/// Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama's layer, with biases of q, k and v. Source: transformers' Qwen2Config and
/// Qwen2Model.
namespace cf::families::qwen2 {

inline constexpr FamilySpec kFamily{.model_type = "qwen2",
                                    .class_name = "Qwen2ForCausalLM",
                                    .names = llama::kNames,
                                    .stored = llama::kStored,
                                    .buffers = llama::kBuffers,
                                    .norm = NormKind::rmsnorm,
                                    .dense_bias_as_qkv = false};

}  // namespace cf::families::qwen2
