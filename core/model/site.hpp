#pragma once
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace cf {

/// A step of the layer: `name` is Hugging Face's module below gpt_neox.layers.N (or what its attention does between
/// modules), `tap` the name under which dumps hold what the step makes. A step with several outputs has one tap each,
/// "tap.output".
struct Site {
  std::string_view name;
  std::string_view tap;
};

/// The tap of one of a step's outputs, "tap" or "tap.output".
inline std::string output_tap(std::string tap, std::string_view output, std::size_t outputs) {
  return outputs == 1 ? std::move(tap) : std::move(tap) + "." + std::string(output);
}

namespace site {
inline constexpr Site input_layernorm{"input_layernorm", "input_layernorm"};
inline constexpr Site query_key_value{"attention.query_key_value", "attention.query_key_value"};
inline constexpr Site rotary_emb{"attention.rotary_emb", "attention.rotary_emb"};
inline constexpr Site kv_append{"attention.kv_append", "attention.kv_append"};
inline constexpr Site context{"attention.context", "attention.context"};
inline constexpr Site dense{"attention.dense", "attention.residual"};
inline constexpr Site post_attention_layernorm{"post_attention_layernorm", "post_attention_layernorm"};
inline constexpr Site dense_h_to_4h{"mlp.dense_h_to_4h", "mlp.act"};
inline constexpr Site dense_4h_to_h{"mlp.dense_4h_to_h", "output"};
}  // namespace site

/// The sites in the order of the walk.
inline constexpr std::array sites{
    site::input_layernorm, site::query_key_value,          site::rotary_emb,    site::kv_append,    site::context,
    site::dense,           site::post_attention_layernorm, site::dense_h_to_4h, site::dense_4h_to_h};

}  // namespace cf
