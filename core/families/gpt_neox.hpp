#pragma once
#include "core/families/family.hpp"

/// GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia. Source: transformers' GPTNeoXConfig and GPTNeoXModel.
namespace cf::families::gpt_neox {

inline constexpr ModelNames kNames{
    .layers = "gpt_neox.layers.",
    .input_layernorm = {"input_layernorm", "input_layernorm", SiteId::input_layernorm},
    .query_key_value = {"attention.query_key_value", "attention.query_key_value", SiteId::query_key_value},
    .rotary_emb = {"attention.rotary_emb", "attention.rotary_emb", SiteId::rotary_emb},
    .kv_append = {"attention.kv_append", "attention.kv_append", SiteId::kv_append},
    .context = {"attention.context", "attention.context", SiteId::context},
    .dense = {"attention.dense", "attention.residual", SiteId::dense},
    .post_attention_layernorm = {"post_attention_layernorm", "post_attention_layernorm",
                                 SiteId::post_attention_layernorm},
    .dense_h_to_4h = {"mlp.dense_h_to_4h", "mlp.act", SiteId::dense_h_to_4h},
    .dense_4h_to_h = {"mlp.dense_4h_to_h", "output", SiteId::dense_4h_to_h},
    .embed_in = {"gpt_neox.embed_in", "embed_in", SiteId::embed_in},
    .final_layer_norm = {"gpt_neox.final_layer_norm", "final_layer_norm", SiteId::final_layer_norm},
    .embed_out = {"embed_out", "logits", SiteId::embed_out},
    .other_head = "lm_head"};

inline constexpr std::string_view kBuffers[] = {"attention.bias", "attention.masked_bias",
                                                "attention.rotary_emb.inv_freq"};

inline constexpr FamilySpec kFamily{.model_type = "gpt_neox",
                                    .class_name = "GPTNeoXForCausalLM",
                                    .names = kNames,
                                    .buffers = kBuffers,
                                    .norm = NormKind::layernorm,
                                    .qkv_layout = ops::QkvLayout::interleaved_by_head};

}  // namespace cf::families::gpt_neox
