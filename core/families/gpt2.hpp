#pragma once
#include "core/families/family.hpp"

/// GPT-2 (Radford et al. 2019): learned positions, no RoPE, and matrices that checkpoints store transposed. Source:
/// transformers' GPT2Config and GPT2Model.
namespace cf::families::gpt2 {

inline constexpr ModelNames kNames{
    .layers = "transformer.h.",
    .input_layernorm = {"ln_1", "ln_1", SiteId::input_layernorm},
    .query_key_value = {"attn.c_attn", "attn.c_attn", SiteId::query_key_value},
    .rotary_emb = {"attn.split", "attn.split", SiteId::rotary_emb},  // rotates nothing: q, k and v are parted
    .kv_append = {"attn.kv_append", "attn.kv_append", SiteId::kv_append},
    .context = {"attn.context", "attn.context", SiteId::context},
    .dense = {"attn.c_proj", "attn.residual", SiteId::dense},
    .post_attention_layernorm = {"ln_2", "ln_2", SiteId::post_attention_layernorm},
    .dense_h_to_4h = {"mlp.c_fc", "mlp.act", SiteId::dense_h_to_4h},
    .dense_4h_to_h = {"mlp.c_proj", "output", SiteId::dense_4h_to_h},
    .embed_in = {"transformer.wte", "drop", SiteId::embed_in},
    .embed_positions = {"transformer.wpe", "", SiteId::embed_positions},
    .final_layer_norm = {"transformer.ln_f", "ln_f", SiteId::final_layer_norm},
    .embed_out = {"lm_head", "logits", SiteId::embed_out}};

inline constexpr StoredLinear kStored[] = {{.site = SiteId::query_key_value, .transposed = true},
                                           {.site = SiteId::dense, .transposed = true},
                                           {.site = SiteId::dense_h_to_4h, .transposed = true},
                                           {.site = SiteId::dense_4h_to_h, .transposed = true}};

inline constexpr std::string_view kBuffers[] = {"attn.bias", "attn.masked_bias"};

using enum ConfigKey;
using enum FieldUse;
inline constexpr ConfigField kFields[] = {{"n_embd", hidden_size, required},
                                          {"n_layer", num_hidden_layers, required},
                                          {"n_head", num_attention_heads, required},
                                          {"n_inner", intermediate_size, read_or_null, SizeOf{hidden_size, 4}},
                                          {"vocab_size", vocab_size, required},
                                          {"n_positions", max_position_embeddings, read, 1024},
                                          {"layer_norm_epsilon", layer_norm_eps, read, 1e-5},
                                          {"activation_function", hidden_act, read, "gelu_new"},
                                          {"tie_word_embeddings", tie_word_embeddings, read, true},
                                          {"scale_attn_weights", none, asserted, true},
                                          {"use_parallel_residual", use_parallel_residual, noted, false},
                                          {"attention_bias", attention_bias, noted, true},
                                          {"mlp_bias", mlp_bias, noted, true},
                                          {"scale_attn_by_inverse_layer_idx", none, refused},
                                          {"reorder_and_upcast_attn", none, refused},
                                          {"add_cross_attention", none, refused}};

inline constexpr Preset kPresets[] = {{.name = "gpt2",
                                       .hidden_size = 768,
                                       .num_hidden_layers = 12,
                                       .num_attention_heads = 12,
                                       .vocab_size = 50257,
                                       .tie_word_embeddings = true}};

inline constexpr FamilySpec kFamily{.model_type = "gpt2",
                                    .class_name = "GPT2LMHeadModel",
                                    .names = kNames,
                                    .stored = kStored,
                                    .buffers = kBuffers,
                                    .norm = NormKind::layernorm,
                                    .positions = Positions::learned,
                                    .activations = kGelus,
                                    .activation_module = "mlp.act",
                                    .fields = kFields,
                                    .presets = kPresets};

}  // namespace cf::families::gpt2
