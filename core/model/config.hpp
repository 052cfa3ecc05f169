#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/dtype.hpp"
#include "core/families/all.hpp"
#include "core/model/shape.hpp"
#include "core/status.hpp"

namespace cf {

std::string_view to_string(ModelType);
/// The type of that name, or none.
std::optional<ModelType> model_type_from_string(std::string_view name);

/// What a config.json says of the network's shape and arithmetic (the families' configs in transformers). Ops, walks
/// and backends take spec() instead.
struct ModelConfig {
  ModelType model_type{};  // the first family where none is said
  std::string name;
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;  // 0: as many as attention heads
  std::int64_t attention_head_dim = 0;   // 0: hidden_size / num_attention_heads
  std::int64_t intermediate_size = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 2048;
  std::int64_t rotary_dim = 0;      // leading elements of each head that RoPE rotates; even, 0 without RoPE
  std::int64_t sliding_window = 0;  // keys that a query sees; 0: all
  /// By layer: whether it sees all keys in spite of sliding_window ("full_attention" in layer_types). Empty: none does.
  std::vector<bool> full_layers{};
  double rope_theta = 10000;
  ops::RopeScaling rope_scaling{};
  double layer_norm_eps = 1e-5;
  bool use_parallel_residual = true;
  bool attention_bias = true;  // of query, key and value, and as the family has it of the attention's output
  bool mlp_bias = true;
  bool tie_word_embeddings = false;
  Activation hidden_act = Activation::gelu_erf;
  DType dtype = DType::f16;  // of the stored weights

  std::int64_t head_dim() const { return attention_head_dim ? attention_head_dim : hidden_size / num_attention_heads; }
  std::int64_t kv_heads() const { return num_key_value_heads ? num_key_value_heads : num_attention_heads; }
  const FamilySpec& family() const { return family_of(model_type); }
  /// The positions that a sequence may have: max_position_embeddings, or the window where that is less.
  std::int64_t most_positions() const {
    return sliding_window ? std::min(sliding_window, max_position_embeddings) : max_position_embeddings;
  }
  /// The model's sizes and arithmetic, on one rank. Refuses nothing: validate() does.
  ModelSpec spec() const;
  /// Lets a config be passed wherever a spec is asked for.
  operator ModelSpec() const { return spec(); }  // NOLINT(google-explicit-constructor)
  /// Parameters of the whole model.
  std::int64_t num_parameters() const;
  /// Parameters of one layer.
  std::int64_t layer_parameters() const;

  /// Refuses a shape that no layer of the family has: sizes below 1, heads that do not divide hidden_size where
  /// head_dim is not given, what ModelSpec::validate() refuses, and what the family's data (FamilySpec) lacks: key and
  /// value heads, a head_dim, a window or a share of the head in RoPE that no field says, a scaling of RoPE, another
  /// value than the family's own, an activation.
  Status validate() const;
};

/// A member of a config, or none for a key that has no member of its own.
using ConfigMember = std::variant<std::monostate, bool*, std::int64_t*, double*>;
ConfigMember member_of(ModelConfig& m, ConfigKey key);

/// A config of the family whose members have the defaults of the family's fields. The sizes without a default are 0.
ModelConfig default_config(ModelType type);

/// The share of a head that RoPE rotates in a config of the family where nothing says it; 0 without RoPE.
double default_rotary_fraction(const FamilySpec& family);

/// The Pythia suite, "pythia-14m" to "pythia-12b" (Biderman et al. 2023, arXiv:2304.01373).
const std::vector<ModelConfig>& pythia_presets();

/// The presets of all families: "pythia-2.8b", "llama-3.1-8b", "qwen2.5-7b" and others.
const std::vector<ModelConfig>& presets();

/// A preset by name, or not_found with the names there are.
Result<ModelConfig> find_preset(std::string_view name);

}  // namespace cf
