#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include "core/dtype.hpp"
#include "core/families/traits.hpp"
#include "core/ops/rope.hpp"

namespace cf {

/// What a field of config.json means. Most keys are members of ModelConfig and have their names. The reader computes
/// other members from the rest, which have the names that most of transformers' families use.
enum class ConfigKey : std::uint8_t {
  none,
  hidden_size,
  num_hidden_layers,
  num_attention_heads,
  num_key_value_heads,
  head_dim,
  intermediate_size,
  vocab_size,
  max_position_embeddings,
  rotary_fraction,  // the share of a head that RoPE rotates
  rope_theta,
  original_max_position_embeddings,  // of llama3's scaling
  sliding_window,
  use_sliding_window,
  max_window_layers,
  layer_types,
  layer_norm_eps,
  use_parallel_residual,
  attention_bias,
  mlp_bias,
  tie_word_embeddings,
  hidden_act
};

/// The keys' names, by their numbers.
inline constexpr std::string_view kConfigKeys[] = {"none",
                                                   "hidden_size",
                                                   "num_hidden_layers",
                                                   "num_attention_heads",
                                                   "num_key_value_heads",
                                                   "head_dim",
                                                   "intermediate_size",
                                                   "vocab_size",
                                                   "max_position_embeddings",
                                                   "rotary_fraction",
                                                   "rope_theta",
                                                   "original_max_position_embeddings",
                                                   "sliding_window",
                                                   "use_sliding_window",
                                                   "max_window_layers",
                                                   "layer_types",
                                                   "layer_norm_eps",
                                                   "use_parallel_residual",
                                                   "attention_bias",
                                                   "mlp_bias",
                                                   "tie_word_embeddings",
                                                   "hidden_act"};
static_assert(std::size(kConfigKeys) == std::size_t(ConfigKey::hidden_act) + 1);

constexpr std::string_view to_string(ConfigKey key) { return kConfigKeys[std::size_t(key)]; }

enum class FieldUse : std::uint8_t {
  required,      // a value, which has no default
  read,          // a value
  read_or_null,  // a value, or null, which transformers writes where it has none and which counts as absent
  asserted,      // a value, which must be the default: anything else is not built
  noted,         // transformers does not read it of this family: where it differs from what counts, there is a note
  refused        // it asks for what is not built, unless it is null, false, empty, or at most one expert
};

constexpr bool is_read(FieldUse use) { return use != FieldUse::noted && use != FieldUse::refused; }

/// A size that is a multiple of another one.
struct SizeOf {
  ConfigKey key;
  std::int64_t factor = 1;
};

/// A field's default: none, a value, or a size that follows from another one.
using ConfigDefault = std::variant<std::monostate, bool, std::int64_t, double, std::string_view, SizeOf>;

/// A field of a family's config.json. Of a field that is noted the default is the family's value of the key, whatever
/// is said; without one the key has another field, which is read.
struct ConfigField {
  std::string_view name;  // in config.json
  ConfigKey key = ConfigKey::none;
  FieldUse use = FieldUse::read;
  ConfigDefault otherwise{};
};

/// A hidden_act's name and what it means.
struct ActivationName {
  std::string_view name;
  Activation activation;
};

/// A published model's sizes. What is 0 or empty is the family's default.
struct Preset {
  std::string_view name;
  DType dtype = DType::f16;
  std::int64_t hidden_size = 0, num_hidden_layers = 0, num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0, head_dim = 0;
  std::int64_t intermediate_size = 0;  // 0: 4 hidden_size
  std::int64_t vocab_size = 0, max_position_embeddings = 0;
  double rope_theta = 0, layer_norm_eps = 0;
  ops::RopeScaling rope_scaling{};
  bool tie_word_embeddings = false;
  std::string_view hidden_act{};
};

/// The GELUs by transformers' names.
inline constexpr ActivationName kGelus[] = {{"gelu", Activation::gelu_erf},
                                            {"gelu_new", Activation::gelu_tanh},
                                            {"gelu_fast", Activation::gelu_tanh},
                                            {"gelu_pytorch_tanh", Activation::gelu_tanh}};

/// Lists one behind the other.
template <class T, std::size_t... Sizes>
constexpr auto joined(const std::array<T, Sizes>&... lists) {
  std::array<T, (Sizes + ...)> all{};
  std::size_t at = 0;
  const auto add = [&](const auto& list) {
    for (const T& item : list) all[at++] = item;
  };
  (add(lists), ...);
  return all;
}

/// A list with another field in the place of the one of that name.
constexpr auto with_field(auto fields, const ConfigField& other) {
  for (ConfigField& field : fields)
    if (field.name == other.name) field = other;
  return fields;
}

}  // namespace cf
