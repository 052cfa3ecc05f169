#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"

namespace cf::checkpoint {

/// What is read of a checkpoint's generation_config.json. How tokens are chosen is the caller's to say: the other
/// fields are not looked at, as servers write values there that others do not know (a top_k of -1 for all).
struct GenerationConfig {
  std::vector<std::int32_t> eos_token_ids = {};  // each ends a sequence

  bool operator==(const GenerationConfig&) const = default;
};

/// Reads a generation_config.json's text. eos_token_id is a number or a list of numbers; null counts as absent.
/// Refuses, naming `source` and the field: text that is empty or not a JSON object, an id outside 0 to 2^31 - 1.
Result<GenerationConfig> parse_generation_config(std::string_view text, const std::string& source);

/// Reads the generation_config.json of a directory. Without that file, eos_token_id comes from config.json, and without
/// either the config is empty. Refuses a file that is not readable or a git-lfs pointer, and what
/// parse_generation_config refuses.
Result<GenerationConfig> read_generation_config(const std::string& directory);

}  // namespace cf::checkpoint
