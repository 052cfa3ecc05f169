#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/families/family.hpp"
#include "core/status.hpp"

namespace cf::checkpoint {

/// A checkpoint's description of its GPTQ weights.
struct GptqConfig {
  int bits = 4;
  std::int64_t group_size = 128;     // -1: one group of all inputs
  bool desc_act = false;             // the groups follow the order of decreasing activations
  bool sym = true;                   // every zero is the middle code
  bool v2 = false;                   // qzeros hold the zeros; in v1 they hold the zeros minus one
  std::vector<std::string> modules;  // the quantised Linears as stored, by name below the layer
  std::string file_base_name;        // of the safetensors files where they are not called model; may be empty

  bool operator==(const GptqConfig&) const = default;
};

/// Reads a quantize_config.json's text. An absent field has AutoGPTQ's default; bits is required. The names are those
/// of AutoGPTQ, GPTQModel and transformers: quant_method or method; checkpoint_format or format, "gptq" (v1) or
/// "gptq_v2"; modules_in_block_to_quantize, all Linears of the family's layers where it is absent or null;
/// model_file_base_name.
/// GPTQModel's `dynamic` is a list of rules: a regular expression for the beginning of modules' names, behind "-:" for
/// those that are left dense, otherwise behind "+:" or nothing with the values that these have. Rules are accepted
/// where none changes a Linear of the model's `layers` layers: one that matches must give the config's own values.
/// Refuses, naming `source` and the field: text that is empty or not a JSON object; another quant_method or format;
/// bits other than 4 and 8; a group_size that is neither positive nor -1; rotation, lm_head, is_marlin_format and
/// adapter unless null, false or empty; other rules in dynamic, and so many that they cannot be compared; a pack_dtype
/// other than int32; a module that is not a Linear of a layer; a field of the wrong type; two names of one field that
/// disagree.
Result<GptqConfig> parse_gptq_config(std::string_view text, const std::string& source, ModelType family = {},
                                     std::int64_t layers = 1);

}  // namespace cf::checkpoint
