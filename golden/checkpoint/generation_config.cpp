#include "golden/checkpoint/generation_config.hpp"

#include <filesystem>
#include <iterator>
#include <utility>

#include "golden/checkpoint/json_fields.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {
namespace {

/// The text's object without its fields that are null.
Result<Json> parse_given_fields(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(Json document, parse_json_object(text, source));
  for (auto it = document.begin(); it != document.end();) it = it->is_null() ? document.erase(it) : std::next(it);
  return document;
}

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
  if (given == document.end()) return ids;
  if (given->is_array())
    for (const Json& value : *given) add(value, "holds");
  else
    add(*given, "is");
  return ids;
}

}  // namespace

Result<GenerationConfig> parse_generation_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(const Json document, parse_given_fields(text, source));
  Fields fields(document, source);
  const auto take = [&]<class T>(const char* name, std::optional<T>& field, const char* expected, auto is_valid) {
    if (!document.contains(name)) return;
    field = fields.required<T>(name);
    if (!is_valid(*field)) fields.refuse(name, "is " + shown(document[name]) + ", expected " + expected);
  };
  GenerationConfig c;
  c.eos_token_ids = eos_token_ids(document, fields);
  take("max_new_tokens", c.max_new_tokens, "1 or more", [](std::int64_t n) { return n >= 1; });
  if (document.contains("do_sample")) c.do_sample = fields.required<bool>("do_sample");
  take("temperature", c.temperature, "0 or more", [](double t) { return t >= 0; });
  take("top_p", c.top_p, "more than 0 and at most 1", [](double p) { return p > 0 && p <= 1; });
  take("min_p", c.min_p, "0 to 1", [](double p) { return p >= 0 && p <= 1; });
  take("repetition_penalty", c.repetition_penalty, "more than 0", [](double p) { return p > 0; });
  take("top_k", c.top_k, "0 (all) or more", [](std::int64_t k) { return k >= 0; });
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

  GenerationConfig c;
  const auto file = map_file(of_model);
  if (!file) return file.status().code() == Code::not_found ? Result<GenerationConfig>(c) : file.status();
  CF_TRY_ASSIGN(const Json document, parse_given_fields(file->text(), of_model));
  Fields fields(document, of_model);
  c.eos_token_ids = eos_token_ids(document, fields);
  CF_TRY(fields.status());
  return c;
}

}  // namespace cf::checkpoint
