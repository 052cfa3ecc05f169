#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"

namespace cf::checkpoint {

/// How a checkpoint asks its tokens to be chosen. The names are those of transformers' GenerationConfig; what the file
/// does not say is empty.
struct GenerationConfig {
  std::vector<std::int32_t> eos_token_ids = {};     // each ends a sequence
  std::optional<std::int64_t> max_new_tokens = {};  // 1 or more
  std::optional<bool> do_sample = {};
  std::optional<double> temperature = {};         // 0 or more
  std::optional<double> top_p = {};               // above 0, at most 1
  std::optional<double> min_p = {};               // 0 to 1
  std::optional<double> repetition_penalty = {};  // above 0
  std::optional<std::int64_t> top_k = {};         // 0 (all) or more

  bool operator==(const GenerationConfig&) const = default;
};

/// Reads a generation_config.json's text. eos_token_id is a number or a list of numbers. A field that is null counts as
/// absent, and other fields are not looked at.
/// Refuses, naming `source` and the field: text that is empty or not a JSON object, a value of the wrong type or out of
/// the range that GenerationConfig names, an id outside 0 to 2^31 - 1.
Result<GenerationConfig> parse_generation_config(std::string_view text, const std::string& source);

/// Reads the generation_config.json of a directory. Without that file, eos_token_id comes from config.json, and without
/// either the config is empty. Refuses a file that is not readable or a git-lfs pointer, and what
/// parse_generation_config refuses.
Result<GenerationConfig> read_generation_config(const std::string& directory);

}  // namespace cf::checkpoint
