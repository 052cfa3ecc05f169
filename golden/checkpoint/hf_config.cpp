#include "golden/checkpoint/hf_config.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "golden/checkpoint/json_fields.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {

namespace {

/// What is read of every config.json beside the family's fields. No other field is looked at: transformers computes
/// nothing from it, such as initializer_range, or it is of training alone, such as attention_dropout.
constexpr std::string_view kCommonNames[] = {"_name_or_path", "dtype", "torch_dtype"};
constexpr std::string_view kRopeObjects[] = {"rope_scaling", "rope_parameters"};

/// The fields of a config that are read of a model of this family.
Json read_fields(const Json& document, const FamilySpec& family) {
  Json read = Json::object();
  const auto take = [&](std::string_view name, bool null_is_absent) {
    const auto it = document.find(name);
    if (it != document.end() && !(it->is_null() && null_is_absent)) read[std::string(name)] = *it;
  };
  for (std::string_view name : kCommonNames) take(name, true);
  if (family.positions == Positions::rope)
    for (std::string_view name : kRopeObjects) take(name, true);
  for (const ConfigField& field : family.fields)
    if (is_read(field.use)) take(field.name, field.use == FieldUse::read_or_null || field.key == ConfigKey::head_dim);
  return read;
}

/// Names in quotes: "'a', 'b' or 'c'".
template <class List, class NameOf>
std::string any_of(const List& list, NameOf&& name_of) {
  std::string text;
  std::size_t left = std::size(list);
  for (const auto& item : list) {
    text += quote(std::string(name_of(item)));
    if (--left > 0) text += left == 1 ? " or " : ", ";
  }
  return text;
}

/// A default as JSON; null for a size that follows from another one.
Json json_of(const ConfigDefault& value) {
  return std::visit(
      []<class T>(const T& v) {
        if constexpr (std::is_same_v<T, std::string_view>) {
          return Json(std::string(v));
        } else if constexpr (std::is_same_v<T, std::monostate> || std::is_same_v<T, SizeOf>) {
          return Json();
        } else {
          return Json(v);
        }
      },
      value);
}

/// A config while it is read.
struct Reading {
  const FamilySpec& family;
  const Json& read;  // the fields that read_fields() gives
  Fields fields;
  std::string source;
  std::vector<std::string> notes{};
  ModelConfig m{};
  double rotary_fraction = 0;

  void note(const std::string& what) { notes.push_back(source + ": " + what); }
  void refuse_value(const std::string& name, const std::string& got, const std::string& expected) {
    fields.refuse(name, "is " + got + ", expected " + expected);
  }
  /// config.json's name of a key that the family reads.
  std::string name_of(ConfigKey key) const { return std::string(family.field(key)->name); }
  /// What it says, or its default.
  template <class T>
  T value(ConfigKey key) {
    return fields.get(name_of(key), family.otherwise<T>(key));
  }
  /// The object that says how RoPE turns: rope_scaling of transformers 4, unless it is empty, before rope_parameters.
  std::string rope_object() const {
    const auto scaling = read.find("rope_scaling");
    return scaling != read.end() && asks(*scaling) ? "rope_scaling" : "rope_parameters";
  }
  /// A value that the object of RoPE has, or the config itself; the object's counts.
  double rope_value(const std::string& inner, ConfigKey key) {
    const std::string nested = rope_object() + "." + inner, outer = name_of(key);
    const double beside = value<double>(key), counts = fields.get(nested, beside);
    if (counts != beside && read.contains(outer))
      note(quote(outer) + " is " + shown(beside) + " beside " + quote(nested) + " " + shown(counts) + ", which counts");
    return counts;
  }
};

/// Reads a member of the config.
void read_member(Reading& r, const ConfigField& field) {
  const std::string name(field.name);
  const auto assign = [&]<class T>(T member) {
    if constexpr (!std::is_same_v<T, std::monostate>) {
      using Value = std::remove_pointer_t<T>;
      if (field.use == FieldUse::required) {
        *member = r.fields.required<Value>(name);
        return;
      }
      Value otherwise{};
      if (const auto* value = std::get_if<Value>(&field.otherwise)) otherwise = *value;
      if constexpr (std::is_same_v<Value, std::int64_t>)
        if (const auto* size = std::get_if<SizeOf>(&field.otherwise)) {
          const std::int64_t of = *std::get<std::int64_t*>(member_of(r.m, size->key));
          // validate() refuses a size whose multiple leaves the integers of 64 bits.
          if (__builtin_mul_overflow(size->factor, of, &otherwise)) otherwise = of;
        }
      *member = r.fields.get(name, otherwise);
    }
  };
  std::visit(assign, member_of(r.m, field.key));
}

/// Refuses another value than the one that is built.
void read_asserted(Reading& r, const ConfigField& field) {
  const auto given = r.read.find(field.name);
  const Json expected = json_of(field.otherwise);
  if (given != r.read.end() && *given != expected)
    r.refuse_value(std::string(field.name), shown(*given), shown(expected));
}

void read_activation(Reading& r) {
  const std::string act = r.fields.get(r.name_of(ConfigKey::hidden_act),
                                       std::string(r.family.otherwise<std::string_view>(ConfigKey::hidden_act)));
  const auto& known = r.family.activations;
  const auto found = std::ranges::find(known, act, &ActivationName::name);
  if (found != known.end())
    r.m.hidden_act = found->activation;
  else
    r.refuse_value(r.name_of(ConfigKey::hidden_act), quote(act), any_of(known, [](auto& a) { return a.name; }));
}

/// A null of num_key_value_heads is as many as heads, whatever the default.
void read_kv_heads(Reading& r, const ConfigField& field) {
  const auto given = r.read.find(field.name);
  if (given != r.read.end() && given->is_null())
    r.m.num_key_value_heads = r.m.num_attention_heads;
  else
    read_member(r, field);
}

/// Reads head_dim. Families in which it is asserted have heads of hidden_size / num_attention_heads elements: their
/// config may give that number and no other.
void read_head_dim(Reading& r, const ConfigField& field) {
  const std::string name(field.name);
  ModelConfig& m = r.m;
  if (field.use != FieldUse::asserted) {
    const auto* const otherwise = std::get_if<std::int64_t>(&field.otherwise);
    m.attention_head_dim = r.fields.get<std::int64_t>(name, otherwise ? *otherwise : 0);
    if (r.read.contains(name) && m.attention_head_dim < 1)
      r.refuse_value(name, std::to_string(m.attention_head_dim), "null or at least 1");
    return;
  }
  if (m.num_attention_heads < 1) return;  // validate() refuses it
  if (const auto given = r.fields.get(name, m.head_dim()); given != m.head_dim())
    r.refuse_value(
        name, std::to_string(given),
        std::to_string(m.head_dim()) + ", hidden_size / num_attention_heads, in " + std::string(r.family.model_type));
}

/// How many elements of a head RoPE rotates, and by which angles.
void read_rope(Reading& r) {
  const Json *scaling = nullptr, *parameters = nullptr;
  for (const auto& [name, object] : {std::pair{"rope_scaling", &scaling}, {"rope_parameters", &parameters}})
    if (const auto it = r.read.find(name); it != r.read.end()) {
      if (!it->is_object()) return r.refuse_value(name, shown(*it), "an object");
      if (!it->empty()) *object = &*it;
    }
  if (scaling && parameters && *scaling != *parameters)
    r.note("'rope_parameters' is not read beside 'rope_scaling', which counts");
  const std::string object = r.rope_object() + ".";
  const auto type = r.fields.get_any({object + "rope_type", object + "type"}, std::string("default"));
  r.m.rope_theta = r.rope_value("rope_theta", ConfigKey::rope_theta);
  if (std::ranges::find(r.family.rope_types, type) == r.family.rope_types.end())
    r.refuse_value("rope_type", quote(type), any_of(r.family.rope_types, [](auto name) { return name; }));
  if (type == "llama3" && r.fields.status()) {
    const auto factor = [&](const char* name) {
      const double value = r.fields.get(object + name, std::nan(""));
      if (std::isnan(value)) r.fields.refuse(name, "is missing, expected a number with rope_type 'llama3'");
      return value;
    };
    r.m.rope_scaling = {
        .kind = ops::RopeScaling::Kind::llama3,
        .factor = factor("factor"),
        .low_freq_factor = factor("low_freq_factor"),
        .high_freq_factor = factor("high_freq_factor"),
        .original_max_positions = r.fields.get_any<std::int64_t>(
            {object + "original_max_position_embeddings", r.name_of(ConfigKey::original_max_position_embeddings)},
            r.m.max_position_embeddings)};
  }

  const ConfigField& share = *r.family.field(ConfigKey::rotary_fraction);
  const std::string name(share.name);
  r.rotary_fraction = r.rope_value("partial_rotary_factor", ConfigKey::rotary_fraction);
  if (!(r.rotary_fraction > 0 && r.rotary_fraction <= 1))
    return r.refuse_value(name, shown(r.rotary_fraction), "more than 0 and at most 1");
  if (share.use == FieldUse::asserted && r.rotary_fraction != std::get<double>(share.otherwise))
    return r.refuse_value(name, shown(r.rotary_fraction), shown(json_of(share.otherwise)));
  // validate() refuses a config without heads, and a head_dim, given or hidden_size / heads, whose product may leave
  // the integers of 64 bits.
  if (r.m.num_attention_heads < 1 || r.m.head_dim() > 1 << 20) return;
  r.m.rotary_dim = std::int64_t(double(r.m.head_dim()) * r.rotary_fraction);
}

/// Reads the window of keys that a query sees, and the layers that see all keys beside it. Where a family reads no
/// use_sliding_window, a sliding_window is enough, and all layers have it.
void read_window(Reading& r) {
  const bool has_window = r.family.reads(ConfigKey::sliding_window),
             is_asked = r.family.reads(ConfigKey::use_sliding_window);
  const bool may_slide = is_asked && r.value<bool>(ConfigKey::use_sliding_window);
  const std::int64_t layers = std::clamp<std::int64_t>(r.m.num_hidden_layers, 0, 1 << 16);  // validate() refuses others
  std::int64_t full = has_window && !is_asked ? 0 : layers;  // layers that see all keys: the first ones
  if (may_slide) full = std::clamp<std::int64_t>(r.value<std::int64_t>(ConfigKey::max_window_layers), 0, layers);
  std::vector<bool> full_layers;  // by layer_types
  if (const auto types = r.read.find("layer_types"); types != r.read.end()) {
    if (!types->is_array()) r.refuse_value("layer_types", shown(*types), "a list");
    for (const Json& type : *types) {
      if (type != "full_attention" && !(may_slide && type == "sliding_attention"))
        r.refuse_value("layer_types", "a list with " + shown(type),
                       may_slide ? "'full_attention' and 'sliding_attention'" : "'full_attention' alone");
      full_layers.push_back(type == "full_attention");
    }
    if (may_slide && std::int64_t(full_layers.size()) != layers)
      r.refuse_value("layer_types", "a list of " + std::to_string(full_layers.size()),
                     "one of " + std::to_string(layers) + " layers");
    if (may_slide) full = std::ranges::count(full_layers, true);
  }
  if (!has_window) return;
  const std::string name = r.name_of(ConfigKey::sliding_window);
  if (const auto given = r.read.find(name); given != r.read.end() && given->is_null()) {
    if (is_asked && full < layers && !full_layers.empty())
      r.refuse_value(name, "null", "at least 1 with layers of 'sliding_attention'");
    return;
  }
  const auto window = r.value<std::int64_t>(ConfigKey::sliding_window);
  if (full >= layers) return;
  if (window < 1) r.refuse_value(name, std::to_string(window), "null or at least 1");
  r.m.sliding_window = window;
  if (full == 0) return;
  if (full_layers.empty()) {
    full_layers.assign(std::size_t(full), true);
    full_layers.resize(std::size_t(layers), false);
  }
  r.m.full_layers = std::move(full_layers);
}

/// Reads the family's fields in their order, and then what follows from several of them.
void read_family(Reading& r) {
  for (const ConfigField& field : r.family.fields) {
    if (!is_read(field.use)) continue;
    switch (field.key) {
      case ConfigKey::none: read_asserted(r, field); break;
      case ConfigKey::hidden_act: read_activation(r); break;
      case ConfigKey::num_key_value_heads: read_kv_heads(r, field); break;
      case ConfigKey::head_dim: read_head_dim(r, field); break;
      case ConfigKey::rope_theta:
      case ConfigKey::rotary_fraction:
      case ConfigKey::sliding_window: break;  // below
      default: field.use == FieldUse::asserted ? read_asserted(r, field) : read_member(r, field);
    }
  }
  read_window(r);
  if (r.family.positions == Positions::rope) read_rope(r);
}

/// A dtype's name, without the prefix that str() gives it in torch.
std::string dtype_name(std::string name) {
  constexpr std::string_view prefix = "torch.";
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

/// The value of a key that counts, whatever config.json says of it; null where the model has none.
Json counting(const ModelConfig& m, ConfigKey key, double rotary_fraction) {
  if (key == ConfigKey::rotary_fraction) return rotary_fraction;
  if (key == ConfigKey::num_key_value_heads) return m.kv_heads();
  if (key == ConfigKey::sliding_window && m.sliding_window == 0) return {};
  ModelConfig config = m;
  return std::visit(
      []<class T>(T member) {
        if constexpr (std::is_same_v<T, std::monostate>) {
          return Json();
        } else {
          return Json(*member);
        }
      },
      member_of(config, key));
}

}  // namespace

Result<HfConfig> parse_noted_hf_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(Json document, parse_json_object(text, source));
  Fields all(document, source);
  const auto type = all.required<std::string>("model_type");
  const auto known = model_type_from_string(type);
  if (!known)
    all.refuse("model_type", "is " + quote(type) + ", expected " +
                                 any_of(kFamilies, [](const FamilySpec* f) { return f->model_type; }));
  CF_TRY(all.status());
  for (const char* name : {"dtype", "torch_dtype"})
    if (const auto it = document.find(name); it != document.end() && it->is_string())
      *it = dtype_name(it->get<std::string>());

  const FamilySpec& family = family_of(*known);
  const Json read = read_fields(document, family);
  Reading r{
      .family = family, .read = read, .fields = Fields(read, source), .source = source, .m = default_config(*known)};
  ModelConfig& m = r.m;
  m.name = r.fields.get("_name_or_path", std::string());
  const auto dtype = r.fields.get_any({"dtype", "torch_dtype"}, std::string("float32"));
  if (const auto d = dtype_from_string(dtype))
    m.dtype = *d;
  else
    r.refuse_value("dtype", quote(dtype), "'float16', 'bfloat16' or 'float32'");
  read_family(r);
  for (const ConfigField& field : family.fields) {
    const auto it = document.find(field.name);
    if (field.use != FieldUse::refused || it == document.end()) continue;
    if (asks(*it) && *it != 0 && *it != 1)
      r.refuse_value(std::string(field.name), shown(*it), "nothing: it is not built");
  }
  CF_TRY(r.fields.status());
  if (const Status s = m.validate(); !s) return Status::error(Code::invalid_file, source + ": " + s.message());
  for (const ConfigField& field : family.fields) {
    const auto it = document.find(field.name);
    if (field.use != FieldUse::noted || it == document.end() || it->is_null()) continue;
    if (const Json counts = counting(m, field.key, r.rotary_fraction); *it != counts)
      r.note(quote(std::string(field.name)) + " is " + shown(*it) + ", which is not read of a " + type + ": " +
             (counts.is_null() ? "it has none" : shown(counts) + " counts"));
  }
  const bool has_dtype = read.contains("dtype") || read.contains("torch_dtype");
  return HfConfig{m, has_dtype ? std::optional(m.dtype) : std::nullopt, std::move(r.notes)};
}

Result<ModelConfig> parse_hf_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(HfConfig read, parse_noted_hf_config(text, source));
  return std::move(read.config);
}

Result<ModelConfig> read_hf_config(const std::string& path) {
  CF_TRY_ASSIGN(const MappedFile file, map_file(path));
  return parse_hf_config(file.text(), path);
}

namespace {

/// The share of a head in RoPE, of which readers round the product with head_dim down.
double rotary_fraction_of(const ModelConfig& m) {
  // The double nearest to rotary_dim / head_dim may lie below the quotient.
  const double fraction = double(m.rotary_dim) / double(m.head_dim());
  return std::int64_t(double(m.head_dim()) * fraction) < m.rotary_dim ? std::nextafter(fraction, 2.0) : fraction;
}

/// Adds the fields of a window. Where the family asks for it, a config without one says nothing.
void write_window(Json& j, const ModelConfig& m) {
  const bool is_asked = m.family().reads(ConfigKey::use_sliding_window);
  if (!m.family().reads(ConfigKey::sliding_window) || (is_asked && m.sliding_window == 0)) return;
  j["sliding_window"] = m.sliding_window ? Json(m.sliding_window) : Json();
  if (is_asked) j.update({{"use_sliding_window", true}, {"max_window_layers", 0}});
  for (const bool is_full : m.full_layers) j["layer_types"].push_back(is_full ? "full_attention" : "sliding_attention");
}

}  // namespace

std::string to_hf_json(const ModelConfig& m) {
  const FamilySpec& family = m.family();
  Json j = {{"architectures", {std::string(family.class_name)}}, {"model_type", std::string(family.model_type)}};
  for (const ConfigField& field : family.fields) {
    if (!is_read(field.use) || field.use == FieldUse::asserted) continue;
    const std::string name(field.name);
    switch (field.key) {
      case ConfigKey::hidden_act: j[name] = std::string(to_string(m.hidden_act)); break;
      case ConfigKey::rotary_fraction: j[name] = rotary_fraction_of(m); break;
      case ConfigKey::head_dim:
        if (m.attention_head_dim) j[name] = m.attention_head_dim;
        break;
      case ConfigKey::sliding_window: break;  // below
      default:
        if (const Json value = counting(m, field.key, 0); !value.is_null()) j[name] = value;
    }
  }
  write_window(j, m);
  if (const ops::RopeScaling& s = m.rope_scaling; s.kind == ops::RopeScaling::Kind::llama3)
    j["rope_scaling"] = {{"rope_type", "llama3"},
                         {"factor", s.factor},
                         {"low_freq_factor", s.low_freq_factor},
                         {"high_freq_factor", s.high_freq_factor},
                         {"original_max_position_embeddings", s.original_max_positions}};
  j["torch_dtype"] = to_string(m.dtype);
  if (!m.name.empty()) j["_name_or_path"] = m.name;
  return indented(j) + "\n";
}

}  // namespace cf::checkpoint
