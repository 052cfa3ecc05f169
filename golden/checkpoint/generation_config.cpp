#include "golden/checkpoint/generation_config.hpp"

#include <filesystem>
#include <utility>

#include "golden/checkpoint/json_fields.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {
namespace {

/// eos_token_id, as one id or several. Faults go to `fields`.
std::vector<std::int32_t> eos_token_ids(const Json& document, Fields& fields) {
  std::vector<std::int32_t> ids;
  const auto add = [&](const Json& value, const std::string& verb) {
    std::int64_t id = -1;
    if (!read(value, id) || !std::in_range<std::int32_t>(id) || id < 0)
      fields.refuse("eos_token_id", verb + " " + shown(value) + ", expected an id of 0 to 2147483647 or a list of ids");
    else
      ids.push_back(std::int32_t(id));
  };
  const auto given = document.find("eos_token_id");
  if (given == document.end() || given->is_null()) return ids;
  if (given->is_array())
    for (const Json& value : *given) add(value, "holds");
  else
    add(*given, "is");
  return ids;
}

}  // namespace

Result<GenerationConfig> parse_generation_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(const Json document, parse_json_object(text, source));
  Fields fields(document, source);
  const GenerationConfig c{.eos_token_ids = eos_token_ids(document, fields)};
  CF_TRY(fields.status());
  return c;
}

Result<GenerationConfig> read_generation_config(const std::string& directory) {
  const auto path = [&](const char* name) { return (std::filesystem::path(directory) / name).string(); };
  const std::string own = path("generation_config.json"), of_model = path("config.json");
  if (const auto file = map_file(own))
    return parse_generation_config(file->text(), own);
  else if (file.status().code() != Code::not_found)
    return file.status();

  const auto file = map_file(of_model);
  if (!file) return file.status().code() == Code::not_found ? Result(GenerationConfig()) : file.status();
  return parse_generation_config(file->text(), of_model);
}

}  // namespace cf::checkpoint
