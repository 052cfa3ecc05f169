#pragma once
#include "core/families/family.hpp"

/// Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288). Source: transformers' LlamaConfig and LlamaModel.
namespace cf::families::llama {

/// qkv_proj joins q_proj, k_proj and v_proj; gate_up_proj joins gate_proj and up_proj.
inline constexpr ModelNames kNames{
    .layers = "model.layers.",
    .input_layernorm = {"input_layernorm", "input_layernorm", SiteId::input_layernorm},
    .query_key_value = {"self_attn.qkv_proj", "self_attn.qkv_proj", SiteId::query_key_value},
    .rotary_emb = {"self_attn.rotary_emb", "self_attn.rotary_emb", SiteId::rotary_emb},
    .kv_append = {"self_attn.kv_append", "self_attn.kv_append", SiteId::kv_append},
    .context = {"self_attn.context", "self_attn.context", SiteId::context},
    .dense = {"self_attn.o_proj", "self_attn.residual", SiteId::dense},
    .post_attention_layernorm = {"post_attention_layernorm", "post_attention_layernorm",
                                 SiteId::post_attention_layernorm},
    .dense_h_to_4h = {"mlp.gate_up_proj", "mlp.act", SiteId::dense_h_to_4h},
    .dense_4h_to_h = {"mlp.down_proj", "output", SiteId::dense_4h_to_h},
    .embed_in = {"model.embed_tokens", "embed_tokens", SiteId::embed_in},
    .final_layer_norm = {"model.norm", "norm", SiteId::final_layer_norm},
    .embed_out = {"lm_head", "logits", SiteId::embed_out}};

inline constexpr std::string_view kQkvParts[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
inline constexpr std::string_view kMlpParts[] = {"mlp.gate_proj", "mlp.up_proj"};
inline constexpr StoredLinear kStored[] = {{.site = SiteId::query_key_value, .parts = kQkvParts},
                                           {.site = SiteId::dense_h_to_4h, .parts = kMlpParts, .interleaved = true}};

inline constexpr std::string_view kBuffers[] = {"self_attn.rotary_emb.inv_freq"};

inline constexpr FamilySpec kFamily{.model_type = "llama",
                                    .class_name = "LlamaForCausalLM",
                                    .names = kNames,
                                    .stored = kStored,
                                    .buffers = kBuffers,
                                    .norm = NormKind::rmsnorm};

}  // namespace cf::families::llama
