#include "golden/checkpoint/gptq_config.hpp"

#include <algorithm>
#include <regex>

#include "core/model/layer.hpp"
#include "core/model/names.hpp"
#include "golden/checkpoint/json_fields.hpp"

namespace cf::checkpoint {
namespace {

/// The names of a layer's Linears as checkpoints store them.
std::vector<std::string> linear_names(ModelType family) {
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

/// The bounds within which rules are compared with a model: a text may ask for more work than any real one does.
constexpr std::size_t kMaxPattern = 128;
constexpr std::int64_t kMaxComparisons = 1 << 15;

/// Whether a rule gives the modules that it matches the config's own values.
bool is_same(const Json& values, const GptqConfig& c) {
  const Json own = {{"bits", c.bits}, {"group_size", c.group_size}, {"desc_act", c.desc_act}, {"sym", c.sym}};
  if (!values.is_object()) return false;
  for (const auto& [name, value] : values.items())
    if (const auto it = own.find(name); it == own.end() || *it != value) return false;
  return true;
}

/// What is wrong with the rules of `dynamic`: one that changes a quantised Linear, or cannot be read. Otherwise "".
/// Source: GPTQModel, QuantizeConfig.dynamic_get(): re.match() of the pattern and a module's whole name.
std::string rule_fault(const Json& rules, const GptqConfig& c, ModelType family, std::int64_t layers) {
  if (!rules.is_object()) return "is " + shown(rules) + ", expected an object of rules";
  const auto comparisons = std::int64_t(rules.size() * c.modules.size());
  if (comparisons > kMaxComparisons / std::max<std::int64_t>(layers, 1))
    return "has " + std::to_string(rules.size()) + " rules for " + std::to_string(layers) +
           " layers, expected fewer of them";
  for (const auto& [rule, values] : rules.items()) {
    const bool leaves_out = rule.starts_with("-:");
    if (!leaves_out && is_same(values, c)) continue;
    const std::string pattern = rule.starts_with("+:") || leaves_out ? rule.substr(2) : rule;
    const std::string unread = "has the rule " + quote(rule) + ", expected a regular expression of at most " +
                               std::to_string(kMaxPattern) + " characters without {}";
    // Braces repeat a pattern as often as they say.
    if (pattern.size() > kMaxPattern || pattern.find('{') != pattern.npos) return unread;
    try {
      // The matcher whose time does not grow exponentially. It knows no references to groups, and refuses them.
      const std::regex expression(pattern, std::regex::ECMAScript | std::regex_constants::__polynomial);
      for (std::int64_t layer = 0; layer < layers; ++layer)
        for (const std::string& module : c.modules) {
          const std::string name = names_of(family).layer(layer) + module;
          if (std::regex_search(name, expression, std::regex_constants::match_continuous))
            return "has the rule " + quote(rule) + ", which changes " + quote(name) +
                   ": expected rules that change no Linear of a layer";
        }
    } catch (const std::regex_error&) {
      return unread;
    }
  }
  return "";
}

}  // namespace

Result<GptqConfig> parse_gptq_config(std::string_view text, const std::string& source, ModelType family,
                                     std::int64_t layers) {
  CF_TRY_ASSIGN(Json document, parse_json_object(text, source));
  Json modules;
  for (const char* name : {"modules_in_block_to_quantize", "inside_layer_modules"})
    if (const auto it = document.find(name); it != document.end() && modules.is_null()) modules = *it;
  std::string asked;
  for (const char* name : {"rotation", "lm_head", "is_marlin_format", "adapter"})
    if (const auto it = document.find(name); asked.empty() && it != document.end() && asks(*it)) asked = name;
  for (const char* name :
       {"checkpoint_format", "format", "quant_method", "method", "pack_dtype", "model_file_base_name"})
    if (const auto it = document.find(name); it != document.end() && it->is_null()) document.erase(it);

  Fields fields(document, source);
  const auto refuse = [&](const std::string& name, const std::string& got, const std::string& expected) {
    fields.refuse(name, "is " + got + ", expected " + expected);
  };
  const auto method = fields.get_any({"quant_method", "method"}, std::string("gptq"));
  if (method != "gptq") refuse("quant_method", quote(method), "'gptq', 'fp8', 'fbgemm_fp8' or 'compressed-tensors'");
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
  c.file_base_name = fields.get("model_file_base_name", std::string());
  if (const auto rules = document.find("dynamic"); rules != document.end() && asks(*rules))
    if (const std::string fault = rule_fault(*rules, c, family, layers); !fault.empty())
      fields.refuse("dynamic", fault);
  CF_TRY(fields.status());
  return c;
}

}  // namespace cf::checkpoint
