#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "core/families/traits.hpp"
#include "core/ops/rope.hpp"
#include "core/status.hpp"

namespace cf {

/// The sizes of a model that one rank holds. A model on one rank has them all; where several ranks share a model, each
/// holds a part of the heads and of intermediate_size, and all of the rest.
struct ModelShape {
  std::int64_t hidden_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;     // query heads of this rank
  std::int64_t num_kv_heads = 0;  // key and value heads of this rank; divides num_heads
  std::int64_t head_dim = 0;
  std::int64_t intermediate_size = 0;  // of this rank's part of the MLP
  std::int64_t vocab_size = 0;
  std::int64_t rotary_dim = 0;     // leading elements of each head that RoPE rotates; even, 0 without RoPE
  std::int64_t max_positions = 0;  // of the texts that the model was made for
  ops::QkvLayout qkv_layout = ops::QkvLayout::interleaved_by_head;
  bool head_norm = false;  // RMSNorm of each head of q and of k, before RoPE: a product of its own shape

  /// Columns of the attention's output: the columns of attention.dense.
  constexpr std::int64_t attention_size() const { return num_heads * head_dim; }
  /// Rows of the query, key and value product.
  constexpr std::int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  /// The heads of the query, key and value product.
  constexpr ops::QkvHeads qkv_heads() const { return {num_heads, num_kv_heads, qkv_layout}; }

  bool operator==(const ModelShape&) const = default;
};

std::string_view to_string(Activation);

/// The arithmetic of a model, whatever its sizes.
struct ModelTraits {
  ModelType family{};  // whose names its modules have (core/families); the arithmetic is in the other traits
  NormKind norm = NormKind::layernorm;
  double layer_norm_eps = 1e-5;
  Activation activation = Activation::gelu_erf;
  Residual residual = Residual::parallel;
  Positions positions = Positions::rope;
  bool qkv_bias = true;          // of the query, key and value product
  bool dense_bias = true;        // of the attention's output product
  bool mlp_bias = true;          // of the MLP's two products
  bool tied_embeddings = false;  // the LM head is the embedding
  std::int64_t window = 0;       // keys that a query sees, its own among them; 0: all
  /// By layer: whether it sees all keys in spite of the window. Empty: no layer does.
  std::vector<bool> full_layers{};
  double rope_theta = 10000;
  ops::RopeScaling rope_scaling{};

  bool operator==(const ModelTraits&) const = default;
};

/// What walks, plans and kernels know of a model.
struct ModelSpec {
  ModelShape shape{};
  ModelTraits traits{};
  /// Whether this rank adds the residual and the biases to the products that are summed over the ranks: attention.dense
  /// and mlp.dense_4h_to_h. One of the ranks that share a model does.
  bool adds_residual = true;
  std::int64_t ranks = 1;  // that share the model; of_rank() gives one's part

  /// 1 / sqrt(head_dim), the factor of the attention scores.
  double attention_scale() const;
  /// Rows of the MLP's first matrix: with SwiGLU gate and up together.
  std::int64_t mlp_rows() const { return (traits.activation == Activation::swiglu ? 2 : 1) * shape.intermediate_size; }
  /// Refuses sizes below 1 or whose product leaves 64 bits; kv heads that do not divide the heads; a rotary_dim that is
  /// odd or beyond head_dim, or not 0 where there is no RoPE; an eps or theta that is not positive; a scaling of
  /// RoPE whose factors are not positive, or whose high_freq_factor is not above its low_freq_factor; a window below 0;
  /// full_layers without a window or of another number of layers.
  Status validate() const;
  /// The model as one of its layers has it: with that layer's window.
  ModelSpec of_layer(std::int64_t layer) const;
  /// The part of the model that rank `rank` of `ranks` holds. The parts' heads and intermediate sizes sum up to the
  /// whole's. Refuses ranks that do not divide both kinds of heads and intermediate_size.
  Result<ModelSpec> of_rank(std::int64_t rank, std::int64_t ranks) const;

  bool operator==(const ModelSpec&) const = default;
};

/// The entries that a sequence may have, and what says so, for messages.
struct EntryLimit {
  std::int64_t most;
  std::string_view name;
};
/// The cache's capacity, or where that is less the model's number of learned positions, or its window: no query leaves
/// a key out until a sequence is longer than the window. Who `leaves_keys_out` is not bound by the window.
EntryLimit entry_limit(const ModelSpec& model, std::int64_t capacity, bool leaves_keys_out = false);

/// A named size and its upper bound, for messages.
struct BoundedSize {
  std::string_view name;
  std::int64_t value, most;
};

/// Refuses the first size outside 1 .. most: "model: hidden_size must be 1 to 1048576, got 0".
Status check_sizes(std::initializer_list<BoundedSize> sizes);

}  // namespace cf
