#include "golden/checkpoint/families_json.hpp"

#include <type_traits>
#include <variant>

#include "core/families/all.hpp"
#include "core/model/config.hpp"
#include "golden/checkpoint/json.hpp"

namespace cf::checkpoint {
namespace {

std::string text(std::string_view t) { return std::string(t); }

template <class List>
Json texts(const List& list) {
  Json all = Json::array();
  for (std::string_view t : list) all.push_back(text(t));
  return all;
}

Json sites_json(const SiteList& sites) {
  Json all = Json::array();
  for (const Site& s : sites)
    all.push_back({{"id", text(to_string(s.id))}, {"name", text(s.name)}, {"tap", text(s.tap)}});
  return all;
}

std::string_view to_string(FieldUse use) {
  switch (use) {
    case FieldUse::required: return "required";
    case FieldUse::read: return "read";
    case FieldUse::read_or_null: return "read_or_null";
    case FieldUse::asserted: return "asserted";
    case FieldUse::noted: return "noted";
    case FieldUse::refused: return "refused";
  }
  return "";
}

Json field_json(const ConfigField& field) {
  Json j{{"name", text(field.name)}, {"key", text(cf::to_string(field.key))}, {"use", text(to_string(field.use))}};
  std::visit(
      [&]<class T>(const T& value) {
        if constexpr (std::is_same_v<T, std::string_view>) {
          j["otherwise"] = text(value);
        } else if constexpr (std::is_same_v<T, SizeOf>) {
          j["size_of"] = {{"key", text(cf::to_string(value.key))}, {"factor", value.factor}};
        } else if constexpr (!std::is_same_v<T, std::monostate>) {
          j["otherwise"] = value;
        }
      },
      field.otherwise);
  return j;
}

/// A preset's config, under ConfigKey's names.
Json preset_json(const FamilySpec& family, const ModelConfig& m) {
  Json j{{"name", m.name}, {"dtype", text(cf::to_string(m.dtype))}};
  ModelConfig config = m;
  for (const ConfigField& field : family.fields)
    if (is_read(field.use) && field.key != ConfigKey::head_dim)
      std::visit(
          [&]<class T>(T member) {
            if constexpr (!std::is_same_v<T, std::monostate>) j[text(cf::to_string(field.key))] = *member;
          },
          member_of(config, field.key));
  if (m.attention_head_dim) j["head_dim"] = m.attention_head_dim;
  j["hidden_act"] = text(cf::to_string(m.hidden_act));
  if (const ops::RopeScaling& s = m.rope_scaling; s.kind != ops::RopeScaling::Kind::none)
    j["rope_scaling"] = {{"factor", s.factor},
                         {"low_freq_factor", s.low_freq_factor},
                         {"high_freq_factor", s.high_freq_factor},
                         {"original_max_position_embeddings", s.original_max_positions}};
  return j;
}

Json family_json(const FamilySpec& f) {
  Json stored = Json::object(), activations = Json::object(), fields = Json::array(), presets = Json::array();
  for (const StoredLinear& s : f.stored)
    stored[text(cf::to_string(s.site))] = {
        {"parts", texts(s.parts)}, {"interleaved", s.interleaved}, {"transposed", s.transposed}};
  for (const ActivationName& a : f.activations) activations[text(a.name)] = text(cf::to_string(a.activation));
  for (const ConfigField& field : f.fields) fields.push_back(field_json(field));
  for (const ModelConfig& m : cf::presets())
    if (&m.family() == &f) presets.push_back(preset_json(f, m));
  return {{"model_type", text(f.model_type)},
          {"class_name", text(f.class_name)},
          {"layers", text(f.names.layers)},
          {"sites", sites_json(f.names.sites())},
          {"outside", sites_json(f.names.outside())},
          {"other_head", text(f.names.other_head)},
          {"stored", stored},
          {"buffers", texts(f.buffers)},
          {"norm", f.norm == NormKind::layernorm ? "layernorm" : "rmsnorm"},
          {"positions", f.positions == Positions::rope ? "rope" : "learned"},
          {"head_norm", f.head_norm},
          {"head_norms", f.head_norm ? Json{text(f.names.q_norm.name), text(f.names.k_norm.name)} : Json::array()},
          {"dense_bias_as_qkv", f.dense_bias_as_qkv},
          {"interleaved_by_head", f.qkv_layout == ops::QkvLayout::interleaved_by_head},
          {"activations", activations},
          {"activation_module", text(f.activation_module)},
          {"rope_types", texts(f.rope_types)},
          {"fields", fields},
          {"presets", presets}};
}

}  // namespace

std::string families_json() {
  Json all = Json::array();
  for (const FamilySpec* family : kFamilies) all.push_back(family_json(*family));
  return indented(all) + "\n";
}

}  // namespace cf::checkpoint
