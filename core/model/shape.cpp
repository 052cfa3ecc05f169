#include "core/model/shape.hpp"

#include <cmath>

namespace cf {
namespace {

Status refuse(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

}  // namespace

std::string_view to_string(Activation a) {
  switch (a) {
    case Activation::gelu_erf: return "gelu";
    case Activation::gelu_tanh: return "gelu_pytorch_tanh";
    case Activation::swiglu: return "silu";
  }
  return "";
}

Status check_sizes(std::initializer_list<BoundedSize> sizes) {
  for (const BoundedSize& s : sizes)
    if (s.value < 1 || s.value > s.most)
      return refuse(std::string(s.name) + " must be 1 to " + std::to_string(s.most) + ", got " +
                    std::to_string(s.value));
  return {};
}

EntryLimit entry_limit(const ModelSpec& model, std::int64_t capacity, bool leaves_keys_out) {
  const std::int64_t window = model.traits.window, positions = model.shape.max_positions;
  if (model.traits.positions == Positions::learned && capacity > positions)
    return {positions, "the config's max_position_embeddings"};
  if (window == 0 || capacity <= window || leaves_keys_out) return {capacity, "the cache's capacity"};
  return {window, "the config's sliding_window"};
}

double ModelSpec::attention_scale() const { return 1 / std::sqrt(double(shape.head_dim)); }

ModelSpec ModelSpec::of_layer(std::int64_t layer) const {
  ModelSpec of = *this;
  if (traits.full_layers.empty()) return of;
  if (traits.full_layers[std::size_t(layer)]) of.traits.window = 0;
  of.traits.full_layers.clear();
  return of;
}

Status ModelSpec::validate() const {
  // The bounds keep every product of sizes far inside 64 bits.
  CF_TRY(check_sizes({{"hidden_size", shape.hidden_size, 1 << 20},
                      {"num_layers", shape.num_layers, 1 << 16},
                      {"num_heads", shape.num_heads, 1 << 16},
                      {"num_kv_heads", shape.num_kv_heads, 1 << 16},
                      {"head_dim", shape.head_dim, 1 << 20},
                      {"intermediate_size", shape.intermediate_size, 1 << 22},
                      {"vocab_size", shape.vocab_size, 1 << 26},
                      {"max_positions", shape.max_positions, 1 << 26}}));
  if (shape.num_heads % shape.num_kv_heads)
    return refuse("num_kv_heads must divide num_heads " + std::to_string(shape.num_heads) + ", got " +
                  std::to_string(shape.num_kv_heads));
  const bool rotates = traits.positions == Positions::rope;
  if (!rotates && shape.rotary_dim != 0)
    return refuse("rotary_dim must be 0 where positions are learned, got " + std::to_string(shape.rotary_dim));
  if (rotates && (shape.rotary_dim < 2 || shape.rotary_dim > shape.head_dim || shape.rotary_dim % 2))
    return refuse("rotary_dim must be even, 2 to head_dim " + std::to_string(shape.head_dim) + ", got " +
                  std::to_string(shape.rotary_dim));
  if (!(traits.layer_norm_eps > 0) || !std::isfinite(traits.layer_norm_eps))
    return refuse("layer_norm_eps must be positive, got " + std::to_string(traits.layer_norm_eps));
  if (!(traits.rope_theta > 0) || !std::isfinite(traits.rope_theta))
    return refuse("rope_theta must be positive, got " + std::to_string(traits.rope_theta));
  if (traits.window < 0) return refuse("window must be 0 or more, got " + std::to_string(traits.window));
  if (const auto layers = std::int64_t(traits.full_layers.size()); layers > 0) {
    if (traits.window == 0) return refuse("full_layers must be empty without a window");
    if (layers != shape.num_layers)
      return refuse("full_layers must be empty or of " + std::to_string(shape.num_layers) + " layers, got " +
                    std::to_string(layers));
  }
  const ops::RopeScaling& scaling = traits.rope_scaling;
  if (scaling.kind == ops::RopeScaling::Kind::none) return {};
  CF_TRY(check_sizes({{"original_max_position_embeddings", scaling.original_max_positions, 1 << 26}}));
  for (const auto& [name, value] : {std::pair{"factor", scaling.factor},
                                    {"low_freq_factor", scaling.low_freq_factor},
                                    {"high_freq_factor", scaling.high_freq_factor}})
    if (!(value > 0) || !std::isfinite(value))
      return refuse("rope_scaling's " + std::string(name) + " must be positive, got " + std::to_string(value));
  if (!(scaling.high_freq_factor > scaling.low_freq_factor))
    return refuse("rope_scaling's high_freq_factor must be above low_freq_factor " +
                  std::to_string(scaling.low_freq_factor) + ", got " + std::to_string(scaling.high_freq_factor));
  return {};
}

Result<ModelSpec> ModelSpec::of_rank(std::int64_t rank, std::int64_t ranks) const {
  CF_TRY(validate());
  if (ranks < 1 || rank < 0 || rank >= ranks)
    return refuse("rank must be 0 to ranks - 1, got rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  ModelSpec part = *this;
  part.adds_residual = adds_residual && rank == 0;
  part.ranks = ranks;
  struct Divided {
    std::string_view name;
    std::int64_t& size;
  };
  for (const Divided& d : {Divided{"num_heads", part.shape.num_heads}, Divided{"num_kv_heads", part.shape.num_kv_heads},
                           Divided{"intermediate_size", part.shape.intermediate_size}}) {
    if (d.size % ranks)
      return refuse(std::to_string(ranks) + " ranks must divide " + std::string(d.name) + ", got " +
                    std::to_string(d.size));
    d.size /= ranks;
  }
  return part;
}

}  // namespace cf
