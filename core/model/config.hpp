#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "core/model/shape.hpp"
#include "core/status.hpp"

namespace cf {

/// What a GPT-NeoX config.json says of the network's shape and arithmetic (transformers: GPTNeoXConfig), under its
/// names. Ops, walks and backends take spec() instead.
struct ModelConfig {
  std::string name;
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 2048;
  std::int64_t rotary_dim = 0;  // leading elements of each head that RoPE rotates; even
  double rope_theta = 10000;
  double layer_norm_eps = 1e-5;
  bool use_parallel_residual = true;
  bool attention_bias = true;  // of query_key_value and attention.dense; the MLP's biases are always there
  bool tie_word_embeddings = false;
  Activation hidden_act = Activation::gelu_erf;
  DType dtype = DType::f16;  // of the stored weights

  std::int64_t head_dim() const { return hidden_size / num_attention_heads; }
  /// The model's sizes and arithmetic, on one rank. Refuses nothing: validate() does.
  ModelSpec spec() const;
  /// Lets a config be passed wherever a spec is asked for.
  operator ModelSpec() const { return spec(); }  // NOLINT(google-explicit-constructor)
  /// Parameters of the whole model.
  std::int64_t num_parameters() const;
  /// Parameters of one layer.
  std::int64_t layer_parameters() const;

  /// Refuses a shape that no GPT-NeoX layer has: sizes below 1, heads that do not divide hidden_size, a rotary_dim
  /// that is odd or beyond head_dim.
  Status validate() const;
};

/// The Pythia suite, "pythia-14m" to "pythia-12b" (Biderman et al. 2023, arXiv:2304.01373).
const std::vector<ModelConfig>& pythia_presets();

/// A preset by name, or not_found with the names there are.
Result<ModelConfig> find_preset(std::string_view name);

}  // namespace cf
