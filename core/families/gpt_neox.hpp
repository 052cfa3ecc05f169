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

inline constexpr std::string_view kRopeTypes[] = {"default"};

using enum ConfigKey;
using enum FieldUse;
inline constexpr ConfigField kFields[] = {{"hidden_size", hidden_size, required},
                                          {"num_hidden_layers", num_hidden_layers, required},
                                          {"num_attention_heads", num_attention_heads, required},
                                          {"intermediate_size", intermediate_size, required},
                                          {"vocab_size", vocab_size, required},
                                          {"head_dim", head_dim, asserted},
                                          {"max_position_embeddings", max_position_embeddings, read, 2048},
                                          {"layer_norm_eps", layer_norm_eps, read, 1e-5},
                                          {"use_parallel_residual", use_parallel_residual, read, true},
                                          {"attention_bias", attention_bias, read, true},
                                          {"hidden_act", hidden_act, read, "gelu"},
                                          {"rotary_emb_base", rope_theta, read, 10000.0},
                                          {"rotary_pct", rotary_fraction, read, 0.25},
                                          {"tie_word_embeddings", tie_word_embeddings, read, false},
                                          {"mlp_bias", mlp_bias, noted, true},
                                          {"num_key_value_heads", num_key_value_heads, noted},
                                          {"partial_rotary_factor", rotary_fraction, noted},
                                          {"rope_theta", rope_theta, noted},
                                          {"sliding_window", sliding_window, noted}};

/// The Pythia suite (Biderman et al. 2023, arXiv:2304.01373), whose larger models pad the vocabulary to a larger
/// multiple, and GPT-NeoX-20B.
inline constexpr Preset kPresets[] = {
    {.name = "pythia-14m", .hidden_size = 128, .num_hidden_layers = 6, .num_attention_heads = 4, .vocab_size = 50304},
    {.name = "pythia-31m", .hidden_size = 256, .num_hidden_layers = 6, .num_attention_heads = 8, .vocab_size = 50304},
    {.name = "pythia-70m", .hidden_size = 512, .num_hidden_layers = 6, .num_attention_heads = 8, .vocab_size = 50304},
    {.name = "pythia-160m",
     .hidden_size = 768,
     .num_hidden_layers = 12,
     .num_attention_heads = 12,
     .vocab_size = 50304},
    {.name = "pythia-410m",
     .hidden_size = 1024,
     .num_hidden_layers = 24,
     .num_attention_heads = 16,
     .vocab_size = 50304},
    {.name = "pythia-1b", .hidden_size = 2048, .num_hidden_layers = 16, .num_attention_heads = 8, .vocab_size = 50304},
    {.name = "pythia-1.4b",
     .hidden_size = 2048,
     .num_hidden_layers = 24,
     .num_attention_heads = 16,
     .vocab_size = 50304},
    {.name = "pythia-2.8b",
     .hidden_size = 2560,
     .num_hidden_layers = 32,
     .num_attention_heads = 32,
     .vocab_size = 50304},
    {.name = "pythia-6.9b",
     .hidden_size = 4096,
     .num_hidden_layers = 32,
     .num_attention_heads = 32,
     .vocab_size = 50432},
    {.name = "pythia-12b",
     .hidden_size = 5120,
     .num_hidden_layers = 36,
     .num_attention_heads = 40,
     .vocab_size = 50688},
    {.name = "gpt-neox-20b",
     .hidden_size = 6144,
     .num_hidden_layers = 44,
     .num_attention_heads = 64,
     .vocab_size = 50432,
     .hidden_act = "gelu_fast"}};

inline constexpr FamilySpec kFamily{.model_type = "gpt_neox",
                                    .class_name = "GPTNeoXForCausalLM",
                                    .names = kNames,
                                    .buffers = kBuffers,
                                    .norm = NormKind::layernorm,
                                    .qkv_layout = ops::QkvLayout::interleaved_by_head,
                                    .activations = kGelus,
                                    .activation_module = "mlp.act",
                                    .rope_types = kRopeTypes,
                                    .fields = kFields,
                                    .presets = kPresets};

}  // namespace cf::families::gpt_neox
