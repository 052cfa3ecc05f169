#pragma once
#include <string>
#include <string_view>

#include "core/model_config.hpp"
#include "core/status.hpp"

namespace cf::golden {

/// Reads a GPT-NeoX config.json's text, of transformers 4.x (rotary_pct, rotary_emb_base, torch_dtype) or 5.x
/// (rope_parameters, dtype). Where a field is absent, transformers' own default for GPTNeoXConfig stands; the sizes
/// (hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size) and model_type must be there.
/// rotary_dim = floor(head_dim * rotary_pct).
/// Refuses, naming `source` and the field: text that is no JSON object; a model_type other than "gpt_neox"; a rope_type
/// other than "default"; a hidden_act without a GELU of ours; a field of the wrong type; two names of one field that disagree; what ModelConfig::validate
/// refuses.
Result<ModelConfig> parse_hf_config(std::string_view text, const std::string& source);

/// The same from a file.
Result<ModelConfig> read_hf_config(const std::string& path);

/// The config as JSON text in the 4.x names. parse_hf_config reads every field back exactly, for a valid config.
std::string to_hf_json(const ModelConfig& m);

}  // namespace cf::golden
