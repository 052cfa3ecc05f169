#pragma once
#include <string>
#include <string_view>

#include "core/model/config.hpp"
#include "core/status.hpp"

namespace cf::checkpoint {

/// Reads a config.json's text of model_type gpt_neox, llama, mistral or qwen2, of transformers 4.x (rotary_pct,
/// rotary_emb_base, rope_scaling, torch_dtype) or 5.x (rope_parameters, dtype). An absent field has transformers'
/// default of the type's config. Required are model_type and the sizes: hidden_size, num_hidden_layers,
/// num_attention_heads, intermediate_size, vocab_size. GPT-NeoX's rotary_dim = floor(head_dim * rotary_pct).
/// Refuses, naming `source` and the field: text that is empty or not a JSON object; another model_type; a rope_type
/// other than "default" and, beside GPT-NeoX, "llama3"; a hidden_act that Activation lacks; a field of the wrong type;
/// two names of one field that disagree; what ModelConfig::validate refuses. Beside GPT-NeoX also a sliding_window
/// shorter than max_position_embeddings, which is mistral's default, experts, norms of queries and keys, attention
/// sinks, and RoPE over a part of the head.
Result<ModelConfig> parse_hf_config(std::string_view text, const std::string& source);

/// Reads a config.json. Refuses a file that is missing, not readable or a git-lfs pointer, and what parse_hf_config
/// refuses.
Result<ModelConfig> read_hf_config(const std::string& path);

/// The config as JSON text in the names of transformers 4.x. parse_hf_config reads every field of a valid config back
/// exactly.
std::string to_hf_json(const ModelConfig& m);

}  // namespace cf::checkpoint
