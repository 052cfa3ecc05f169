#pragma once
#include <array>
#include <string>

#include "core/model/shape.hpp"
#include "core/model/site.hpp"

namespace cf {

/// The names of a family's modules, and nothing else: Hugging Face's, but for the steps that it has no module for. A
/// product of several matrices that Hugging Face keeps apart has a name in the same style.
struct ModelNames {
  std::string_view layers;  // what a layer's names begin with, before its number
  Site input_layernorm, query_key_value, rotary_emb, kv_append, context, dense, post_attention_layernorm, dense_h_to_4h,
      dense_4h_to_h;
  Site embed_in, final_layer_norm, embed_out;  // outside the layers, by their whole names
  // The modules whose matrices checkpoints store apart and the walk has as one; none where they are stored as one.
  std::array<std::string_view, 3> stored_qkv{};  // one below the other
  std::array<std::string_view, 2> stored_mlp{};  // their rows in turn
  std::array<std::string_view, 3> buffers{};     // of a layer in old checkpoints, which no one reads
  std::string_view other_head{};                 // what transformers 5 calls embed_out in memory, and some files, too

  /// The layer's sites in the order of the walk.
  constexpr std::array<Site, 9> sites() const {
    return {input_layernorm, query_key_value,          rotary_emb,    kv_append,    context,
            dense,           post_attention_layernorm, dense_h_to_4h, dense_4h_to_h};
  }
  /// "gpt_neox.layers.3."
  std::string layer(std::int64_t index) const { return std::string(layers) + std::to_string(index) + "."; }
  /// What the names of tensors outside the head begin with, up to its dot: "gpt_neox.".
  constexpr std::string_view base() const { return layers.substr(0, layers.find('.') + 1); }
};

/// GPT-NeoX's names. Code that means a step of any family uses Site::id.
namespace site {
inline constexpr Site input_layernorm{"input_layernorm", "input_layernorm", SiteId::input_layernorm};
inline constexpr Site query_key_value{"attention.query_key_value", "attention.query_key_value",
                                      SiteId::query_key_value};
inline constexpr Site rotary_emb{"attention.rotary_emb", "attention.rotary_emb", SiteId::rotary_emb};
inline constexpr Site kv_append{"attention.kv_append", "attention.kv_append", SiteId::kv_append};
inline constexpr Site context{"attention.context", "attention.context", SiteId::context};
inline constexpr Site dense{"attention.dense", "attention.residual", SiteId::dense};
inline constexpr Site post_attention_layernorm{"post_attention_layernorm", "post_attention_layernorm",
                                               SiteId::post_attention_layernorm};
inline constexpr Site dense_h_to_4h{"mlp.dense_h_to_4h", "mlp.act", SiteId::dense_h_to_4h};
inline constexpr Site dense_4h_to_h{"mlp.dense_4h_to_h", "output", SiteId::dense_4h_to_h};
inline constexpr Site embed_in{"gpt_neox.embed_in", "embed_in", SiteId::embed_in};
inline constexpr Site final_layer_norm{"gpt_neox.final_layer_norm", "final_layer_norm", SiteId::final_layer_norm};
inline constexpr Site embed_out{"embed_out", "logits", SiteId::embed_out};
}  // namespace site

inline constexpr ModelNames kGptNeoxNames{
    .layers = "gpt_neox.layers.",
    .input_layernorm = site::input_layernorm,
    .query_key_value = site::query_key_value,
    .rotary_emb = site::rotary_emb,
    .kv_append = site::kv_append,
    .context = site::context,
    .dense = site::dense,
    .post_attention_layernorm = site::post_attention_layernorm,
    .dense_h_to_4h = site::dense_h_to_4h,
    .dense_4h_to_h = site::dense_4h_to_h,
    .embed_in = site::embed_in,
    .final_layer_norm = site::final_layer_norm,
    .embed_out = site::embed_out,
    .buffers = {"attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"},
    .other_head = "lm_head"};

/// The names of Llama, Mistral and Qwen2. qkv_proj joins q_proj, k_proj and v_proj; gate_up_proj joins gate_proj and
/// up_proj.
inline constexpr ModelNames kLlamaNames{
    .layers = "model.layers.",
    .input_layernorm = site::input_layernorm,
    .query_key_value = {"self_attn.qkv_proj", "self_attn.qkv_proj", SiteId::query_key_value},
    .rotary_emb = {"self_attn.rotary_emb", "self_attn.rotary_emb", SiteId::rotary_emb},
    .kv_append = {"self_attn.kv_append", "self_attn.kv_append", SiteId::kv_append},
    .context = {"self_attn.context", "self_attn.context", SiteId::context},
    .dense = {"self_attn.o_proj", "self_attn.residual", SiteId::dense},
    .post_attention_layernorm = site::post_attention_layernorm,
    .dense_h_to_4h = {"mlp.gate_up_proj", "mlp.act", SiteId::dense_h_to_4h},
    .dense_4h_to_h = {"mlp.down_proj", "output", SiteId::dense_4h_to_h},
    .embed_in = {"model.embed_tokens", "embed_tokens", SiteId::embed_in},
    .final_layer_norm = {"model.norm", "norm", SiteId::final_layer_norm},
    .embed_out = {"lm_head", "logits", SiteId::embed_out},
    .stored_qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    .stored_mlp = {"mlp.gate_proj", "mlp.up_proj"},
    .buffers = {"self_attn.rotary_emb.inv_freq"}};

constexpr const ModelNames& names_of(ModelFamily family) {
  return family == ModelFamily::llama ? kLlamaNames : kGptNeoxNames;
}
constexpr const ModelNames& names_of(const ModelSpec& m) { return names_of(m.traits.family); }

/// GPT-NeoX's sites in the order of the walk. Every family has as many.
inline constexpr std::array sites = kGptNeoxNames.sites();

}  // namespace cf
