#include "golden/checkpoint/gptq_config.hpp"

#include <algorithm>

#include "core/model/layer.hpp"
#include "golden/checkpoint/json_fields.hpp"

namespace cf::checkpoint {
namespace {

/// The names of a layer's Linears as checkpoints store them.
std::vector<std::string> linear_names(ModelFamily family) {
  std::vector<std::string> names;
  const ModelSpec m{.shape = {}, .traits = {.family = family}};
  for_each_linear(m, LayerWeights{}, [&](const Site& site, const auto&, const LinearSize& size) {
    for (const StoredPart& part : stored_parts(m, site, size).parts) names.emplace_back(part.module);
  });
  return names;
}

/// Collects the names of a list, or of a list of lists.
bool collect(const Json& value, std::vector<std::string>& names) {
  if (value.is_string()) return names.push_back(value.get<std::string>()), true;
  return value.is_array() && std::all_of(value.begin(), value.end(), [&](const Json& v) { return collect(v, names); });
}

}  // namespace

Result<GptqConfig> parse_gptq_config(std::string_view text, const std::string& source, ModelFamily family) {
  CF_TRY_ASSIGN(Json document, parse_json_object(text, source));
  Json modules;
  for (const char* name : {"modules_in_block_to_quantize", "inside_layer_modules"})
    if (const auto it = document.find(name); it != document.end() && modules.is_null()) modules = *it;
  std::string asked;
  for (const char* name : {"dynamic", "rotation", "lm_head", "is_marlin_format", "adapter"})
    if (const auto it = document.find(name); asked.empty() && it != document.end() && asks(*it)) asked = name;
  for (const char* name : {"checkpoint_format", "format", "quant_method", "method", "pack_dtype"})
    if (const auto it = document.find(name); it != document.end() && it->is_null()) document.erase(it);

  Fields fields(document, source);
  const auto refuse = [&](const std::string& name, const std::string& got, const std::string& expected) {
    fields.refuse(name, "is " + got + ", expected " + expected);
  };
  const auto method = fields.get_any({"quant_method", "method"}, std::string("gptq"));
  if (method != "gptq") refuse("quant_method", quote(method), "'gptq'");
  GptqConfig c;
  const auto bits = fields.required<std::int64_t>("bits");
  if (bits != 4 && bits != 8) refuse("bits", std::to_string(bits), "4 or 8");
  c.bits = int(bits);
  c.group_size = fields.get<std::int64_t>("group_size", 128);
  if (c.group_size != -1 && (c.group_size < 1 || c.group_size > 1 << 22))
    refuse("group_size", std::to_string(c.group_size), "-1 or 1 to 4194304");
  c.desc_act = fields.get("desc_act", false);
  c.sym = fields.get("sym", true);
  const auto format = fields.get_any({"checkpoint_format", "format"}, std::string("gptq"));
  if (format != "gptq" && format != "gptq_v2") refuse("checkpoint_format", quote(format), "'gptq' or 'gptq_v2'");
  c.v2 = format == "gptq_v2";
  const auto pack = fields.get("pack_dtype", std::string("int32"));
  if (pack != "int32") refuse("pack_dtype", quote(pack), "'int32'");
  if (!asked.empty()) refuse(asked, shown((document)[asked]), "nothing: it is not supported");

  const std::vector<std::string> known = linear_names(family);
  c.modules = known;
  if (!modules.is_null()) {
    c.modules.clear();
    if (!collect(modules, c.modules)) refuse("modules_in_block_to_quantize", shown(modules), "lists of names");
    for (const std::string& name : c.modules)
      if (std::find(known.begin(), known.end(), name) == known.end())
        refuse("modules_in_block_to_quantize", quote(name), "names of a layer's Linears, such as " + quote(known[0]));
  }
  CF_TRY(fields.status());
  return c;
}

}  // namespace cf::checkpoint
