#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/config.hpp"
#include "core/status.hpp"

namespace cf::checkpoint {

/// Reads a config.json's text of a family of core/families, of transformers 4.x (rotary_pct, rotary_emb_base,
/// rope_scaling, torch_dtype) or 5.x (rope_parameters, dtype). FamilySpec::fields says which fields are required, read
/// with a default, ignored with a note, and refused. rotary_dim = floor(head_dim * the share of a head in RoPE).
/// Refuses, naming `source` and the field: text that is empty or not a JSON object; another model_type; a rope_type
/// that the family lacks; a hidden_act that it lacks; a field of the wrong type; two names of one field that disagree;
/// another value of a field that the family asserts; what ModelConfig::validate refuses.
Result<ModelConfig> parse_hf_config(std::string_view text, const std::string& source);

/// A config and what else its text says.
struct HfConfig {
  ModelConfig config;
  std::optional<DType> dtype;  // where the text names one
  /// A line for each value that does not count: of a field that transformers does not read of the type, or of a name
  /// that a nested one replaces, such as rope_theta beside rope_parameters.rope_theta.
  std::vector<std::string> notes;
};

/// What parse_hf_config() reads and refuses, with notes.
Result<HfConfig> parse_noted_hf_config(std::string_view text, const std::string& source);

/// Reads a config.json. Refuses a file that is missing, not readable or a git-lfs pointer, and what parse_hf_config
/// refuses.
Result<ModelConfig> read_hf_config(const std::string& path);

/// The config as JSON text in the names of transformers 4.x. parse_hf_config reads every field of a valid config back
/// exactly.
std::string to_hf_json(const ModelConfig& m);

}  // namespace cf::checkpoint
