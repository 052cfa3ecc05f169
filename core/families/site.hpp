#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

namespace cf {

/// What a step is, whatever its family calls it. `other`: a step of a walk that is no model's.
enum class SiteId : std::uint8_t {
  other,
  input_layernorm,
  query_key_value,
  qk_norm,
  rotary_emb,
  kv_append,
  context,
  dense,
  post_attention_layernorm,
  dense_h_to_4h,
  dense_4h_to_h,
  embed_in,
  embed_positions,
  final_layer_norm,
  embed_out
};

/// The steps' names, by their numbers.
inline constexpr std::string_view kSiteIds[] = {"other",
                                                "input_layernorm",
                                                "query_key_value",
                                                "qk_norm",
                                                "rotary_emb",
                                                "kv_append",
                                                "context",
                                                "dense",
                                                "post_attention_layernorm",
                                                "dense_h_to_4h",
                                                "dense_4h_to_h",
                                                "embed_in",
                                                "embed_positions",
                                                "final_layer_norm",
                                                "embed_out"};
static_assert(std::size(kSiteIds) == std::size_t(SiteId::embed_out) + 1);

constexpr std::string_view to_string(SiteId id) { return kSiteIds[std::size_t(id)]; }

/// A step of the layer: `name` is Hugging Face's module below the layer (or what its attention does between modules),
/// `tap` the name under which dumps hold what the step makes. A step with several outputs has one tap each,
/// "tap.output". Code that means one step compares `id`: names differ between families.
struct Site {
  std::string_view name;
  std::string_view tap;
  SiteId id = SiteId::other;
};

/// The tap of one of a step's outputs, "tap" or "tap.output".
inline std::string output_tap(std::string tap, std::string_view output, std::size_t outputs) {
  return outputs == 1 ? std::move(tap) : std::move(tap) + "." + std::string(output);
}

}  // namespace cf
