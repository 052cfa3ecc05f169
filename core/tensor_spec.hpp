#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace cf {

/// What a tensor is to its op. Activations share one dtype, weights another.
enum class Role : std::uint8_t {
  input,       // an activation that is read
  output,      // an activation of which every element is written
  state,       // an activation that is read and written in part: a KV cache that grows
  cache,       // an activation that is read up to its sequence's length: a KV cache
  weight,      // a parameter as stored: f16, bf16 or f32 (or f64, for tests)
  gain,        // a weight around 1: a LayerNorm's gamma
  gptq,        // a part of a quantised weight, of a dtype of its own: packed int32 or float16 scales
  cosine,      // float32 whatever the activations are: RoPE's table
  sine,        // the same
  length,      // int32: a sequence's valid cache entries
  position,    // int32: a token's row of RoPE's table
  token_id,    // int32: a row of the embedding
  page_table,  // int32: the pages of a sequence's cache
};

constexpr bool is_activation(Role r) {
  return r == Role::input || r == Role::output || r == Role::state || r == Role::cache;
}
constexpr bool is_weight(Role r) { return r == Role::weight || r == Role::gain; }
constexpr bool is_table(Role r) { return r == Role::cosine || r == Role::sine; }
constexpr bool is_index(Role r) {
  return r == Role::length || r == Role::position || r == Role::token_id || r == Role::page_table;
}
/// Whether an op reads an activation of that role without changing it, and whether it changes it. A state counts as
/// changed.
constexpr bool is_read(Role r) { return r == Role::input || r == Role::cache; }
constexpr bool is_written(Role r) { return r == Role::output || r == Role::state; }

/// What a list of tensors says of each tensor beside its view and its shape. Every list calls f(spec, view, shape).
struct TensorSpec {
  Role role;
  std::string_view name;  // valid during f's call
  bool optional = false;  // the view may be empty
};

/// A tensor's expected shape, as lists of tensors pass it to f.
template <class... Size>
constexpr std::array<std::int64_t, sizeof...(Size)> extents(Size... size) {
  return {std::int64_t(size)...};
}

}  // namespace cf
