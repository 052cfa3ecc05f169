#pragma once
// Private to the checkpoint library: JSON from files of unknown origin. The parser and the writer, large templates
// both, are compiled in json.cpp alone.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.hpp"
#include "golden/checkpoint/printable.hpp"

namespace cf::checkpoint {

using Json = nlohmann::json;

/// A value in a message: scalars as JSON text, arrays and objects by their type.
std::string shown(const Json& value);

/// Reads text that must be one JSON object. `source` names it in messages.
Result<Json> parse_json_object(std::string_view text, const std::string& source);

/// JSON text with indentation; bytes that are not UTF-8 are replaced.
std::string indented(const Json& value);
/// The same in one line.
std::string one_line(const Json& value);

}  // namespace cf::checkpoint
