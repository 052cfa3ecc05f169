#include "core/model/config.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <tuple>
#include <type_traits>

#include "core/model/weights.hpp"

namespace cf {
namespace {

template <class Extents>
std::int64_t product(const Extents& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t(1), std::multiplies<>());
}

ModelConfig of_preset(ModelType type, const Preset& p) {
  ModelConfig m = default_config(type);
  const FamilySpec& family = family_of(type);
  m.name = p.name;
  m.dtype = p.dtype;
  m.hidden_size = p.hidden_size;
  m.num_hidden_layers = p.num_hidden_layers;
  m.num_attention_heads = p.num_attention_heads;
  m.num_key_value_heads = p.num_key_value_heads;
  m.attention_head_dim = p.head_dim;
  m.intermediate_size = p.intermediate_size ? p.intermediate_size : 4 * p.hidden_size;
  m.vocab_size = p.vocab_size;
  if (p.max_position_embeddings) m.max_position_embeddings = p.max_position_embeddings;
  if (p.rope_theta != 0) m.rope_theta = p.rope_theta;
  if (p.layer_norm_eps != 0) m.layer_norm_eps = p.layer_norm_eps;
  m.rope_scaling = p.rope_scaling;
  m.tie_word_embeddings = p.tie_word_embeddings;
  for (const ActivationName& a : family.activations)
    if (a.name == p.hidden_act) m.hidden_act = a.activation;
  m.rotary_dim = std::int64_t(double(m.head_dim()) * default_rotary_fraction(family));
  return m;
}

}  // namespace

std::string_view to_string(ModelType type) { return family_of(type).model_type; }

std::optional<ModelType> model_type_from_string(std::string_view name) {
  for (std::size_t type = 0; type < kFamilies.size(); ++type)
    if (name == kFamilies[type]->model_type) return ModelType(type);
  return std::nullopt;
}

ModelSpec ModelConfig::spec() const {
  return {.shape = {.hidden_size = hidden_size,
                    .num_layers = num_hidden_layers,
                    .num_heads = num_attention_heads,
                    .num_kv_heads = kv_heads(),
                    .head_dim = num_attention_heads > 0 ? head_dim() : 0,
                    .intermediate_size = intermediate_size,
                    .vocab_size = vocab_size,
                    .rotary_dim = rotary_dim,
                    .max_positions = max_position_embeddings,
                    .qkv_layout = family().qkv_layout,
                    .head_norm = family().head_norm},
          .traits = {.family = model_type,
                     .norm = family().norm,
                     .layer_norm_eps = layer_norm_eps,
                     .activation = hidden_act,
                     .residual = use_parallel_residual ? Residual::parallel : Residual::sequential,
                     .positions = family().positions,
                     .qkv_bias = attention_bias,
                     .dense_bias = attention_bias && family().dense_bias_as_qkv,
                     .mlp_bias = mlp_bias,
                     .tied_embeddings = tie_word_embeddings,
                     .window = sliding_window,
                     .full_layers = full_layers,
                     .rope_theta = rope_theta,
                     .rope_scaling = rope_scaling}};
}

std::int64_t ModelConfig::layer_parameters() const {
  std::int64_t sum = 0;
  LayerWeights weights;
  for_each_weight(spec(), weights, [&](const TensorSpec&, const auto&, auto shape) { sum += product(shape); });
  return sum;
}

std::int64_t ModelConfig::num_parameters() const {
  std::int64_t sum = num_hidden_layers * layer_parameters();
  ModelWeights rest;
  for_each_model_weight(spec(), rest, [&](const TensorSpec&, const auto&, auto shape) { sum += product(shape); });
  return sum;
}

ConfigMember member_of(ModelConfig& m, ConfigKey key) {
  switch (key) {
    case ConfigKey::hidden_size: return &m.hidden_size;
    case ConfigKey::num_hidden_layers: return &m.num_hidden_layers;
    case ConfigKey::num_attention_heads: return &m.num_attention_heads;
    case ConfigKey::num_key_value_heads: return &m.num_key_value_heads;
    case ConfigKey::head_dim: return &m.attention_head_dim;
    case ConfigKey::intermediate_size: return &m.intermediate_size;
    case ConfigKey::vocab_size: return &m.vocab_size;
    case ConfigKey::max_position_embeddings: return &m.max_position_embeddings;
    case ConfigKey::sliding_window: return &m.sliding_window;
    case ConfigKey::rope_theta: return &m.rope_theta;
    case ConfigKey::layer_norm_eps: return &m.layer_norm_eps;
    case ConfigKey::use_parallel_residual: return &m.use_parallel_residual;
    case ConfigKey::attention_bias: return &m.attention_bias;
    case ConfigKey::mlp_bias: return &m.mlp_bias;
    case ConfigKey::tie_word_embeddings: return &m.tie_word_embeddings;
    default: return {};
  }
}

ModelConfig default_config(ModelType type) {
  const FamilySpec& family = family_of(type);
  ModelConfig m;
  m.model_type = type;
  for (const ConfigField& field : family.fields) {
    if (field.key == ConfigKey::sliding_window) continue;  // its default counts where keys are left out
    const auto assign = [&]<class T>(T member) {
      if constexpr (!std::is_same_v<T, std::monostate>)
        if (const auto* value = std::get_if<std::remove_pointer_t<T>>(&field.otherwise)) *member = *value;
    };
    std::visit(assign, member_of(m, field.key));
  }
  const auto act = family.otherwise<std::string_view>(ConfigKey::hidden_act);
  for (const ActivationName& a : family.activations)
    if (a.name == act) m.hidden_act = a.activation;
  return m;
}

double default_rotary_fraction(const FamilySpec& family) {
  return family.positions == Positions::rope ? family.otherwise<double>(ConfigKey::rotary_fraction) : 0;
}

Status ModelConfig::validate() const {
  const auto refuse = [](std::string what) { return Status::error(Code::invalid_argument, "model: " + what); };
  const FamilySpec& f = family();
  const std::string type(f.model_type);
  // These messages name the sizes as config.json does; those of the spec have other names.
  CF_TRY(check_sizes({{"hidden_size", hidden_size, 1 << 20},
                      {"num_hidden_layers", num_hidden_layers, 1 << 16},
                      {"num_attention_heads", num_attention_heads, 1 << 16},
                      {"max_position_embeddings", max_position_embeddings, 1 << 26}}));
  if (attention_head_dim == 0 && hidden_size % num_attention_heads)
    return refuse("num_attention_heads must divide hidden_size, got " + std::to_string(num_attention_heads) +
                  " heads and hidden_size " + std::to_string(hidden_size));
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32)
    return refuse("dtype must be float16, bfloat16 or float32, got " + std::string(to_string(dtype)));
  if (f.reads(ConfigKey::num_key_value_heads))
    CF_TRY(check_sizes({{"num_key_value_heads", num_key_value_heads, 1 << 16}}));
  const auto has_none = [&](std::string_view what, const std::string& got) {
    return refuse(type + " has no " + std::string(what) + ", got " + got);
  };
  for (const auto& [key, name, value] :
       {std::tuple{ConfigKey::num_key_value_heads, "num_key_value_heads of its own", num_key_value_heads},
        {ConfigKey::head_dim, "head_dim of its own", attention_head_dim},
        {ConfigKey::sliding_window, "sliding_window", sliding_window}})
    if (value && !f.reads(key)) return has_none(name, std::to_string(value));
  if (rope_scaling != ops::RopeScaling{} && f.rope_types.size() < 2) return has_none("scaling of RoPE", "one");
  if (std::ranges::none_of(f.activations, [&](const ActivationName& a) { return a.activation == hidden_act; }))
    return refuse(type + " with hidden_act " + std::string(to_string(hidden_act)) + " is not built");
  // What a family fixes is true or false.
  ModelConfig given = *this;
  for (const ConfigField& field : f.fields) {
    const auto* fixed = std::get_if<bool>(&field.otherwise);
    bool* const* value = nullptr;
    const ConfigMember member = member_of(given, field.key);
    const bool has_no_other = field.use == FieldUse::noted || field.use == FieldUse::asserted;
    if (has_no_other && fixed) value = std::get_if<bool*>(&member);
    if (value && **value != *fixed)
      return refuse("expected " + std::string(to_string(field.key)) + " " + (*fixed ? "true" : "false") + " in " +
                    type + ", got " + (*fixed ? "false" : "true"));
  }
  CF_TRY(spec().validate());
  if (f.positions == Positions::rope && !f.reads(ConfigKey::rotary_fraction) && rotary_dim != head_dim())
    return refuse("rotary_dim must be head_dim " + std::to_string(head_dim()) + " in " + type + ", got " +
                  std::to_string(rotary_dim));
  return {};
}

const std::vector<ModelConfig>& presets() {
  static const std::vector<ModelConfig> all = [] {
    std::vector<ModelConfig> list;
    for (std::size_t type = 0; type < kFamilies.size(); ++type)
      for (const Preset& p : kFamilies[type]->presets) list.push_back(of_preset(ModelType(type), p));
    return list;
  }();
  return all;
}

const std::vector<ModelConfig>& pythia_presets() {
  static const std::vector<ModelConfig> found = [] {
    std::vector<ModelConfig> list;
    std::ranges::copy_if(presets(), std::back_inserter(list),
                         [](const ModelConfig& m) { return m.name.starts_with("pythia-"); });
    return list;
  }();
  return found;
}

Result<ModelConfig> find_preset(std::string_view name) {
  std::string names;
  for (const ModelConfig& m : presets()) {
    if (m.name == name) return m;
    names += (names.empty() ? "" : ", ") + m.name;
  }
  return Status::error(Code::not_found, "preset '" + std::string(name) + "' is unknown; there are " + names);
}

}  // namespace cf
