#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "core/status.hpp"

namespace cf {

/// gelu_erf: x/2 (1 + erf(x/sqrt 2)), Hugging Face's "gelu".
/// gelu_tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), its "gelu_new", "gelu_fast" and "gelu_pytorch_tanh".
enum class Activation : std::uint8_t { gelu_erf, gelu_tanh };

std::string_view to_string(Activation);

/// What a GPT-NeoX config.json says of the network's shape and arithmetic (transformers: GPTNeoXConfig).
struct ModelConfig {
  std::string name;
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 2048;
  std::int64_t rotary_dim = 0;  // of each head's head_dim, the leading elements that RoPE turns; even
  double rope_theta = 10000;
  double layer_norm_eps = 1e-5;
  bool use_parallel_residual = true;
  bool attention_bias = true;  // of query_key_value and attention.dense; the MLP's biases are always there
  Activation hidden_act = Activation::gelu_erf;
  DType dtype = DType::f16;  // of the stored weights

  std::int64_t head_dim() const { return hidden_size / num_attention_heads; }
  /// 1 / sqrt(head_dim), the factor of the attention scores.
  double attention_scale() const;
  /// Parameters of the whole model, with untied embeddings.
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
