#pragma once
#include "core/families/llama.hpp"

/// StableLM 3B and 2 (Bellagente et al. 2024, arXiv:2402.17834): Llama's layer with LayerNorm, and RoPE on a quarter of
/// a head. Source: transformers' StableLmConfig and StableLmModel.
namespace cf::families::stablelm {

inline constexpr std::string_view kRopeTypes[] = {"default"};

using enum ConfigKey;
using enum FieldUse;
inline constexpr ConfigField kFields[] = {{"hidden_size", hidden_size, required},
                                          {"num_hidden_layers", num_hidden_layers, required},
                                          {"num_attention_heads", num_attention_heads, required},
                                          {"num_key_value_heads", num_key_value_heads, read, 32},
                                          {"head_dim", head_dim, asserted},
                                          {"intermediate_size", intermediate_size, required},
                                          {"vocab_size", vocab_size, required},
                                          {"max_position_embeddings", max_position_embeddings, read, 4096},
                                          {"layer_norm_eps", layer_norm_eps, read, 1e-5},
                                          {"use_qkv_bias", attention_bias, read, false},
                                          {"hidden_act", hidden_act, read, "silu"},
                                          {"rope_theta", rope_theta, read, 10000.0},
                                          {"partial_rotary_factor", rotary_fraction, read, 0.25},
                                          {"tie_word_embeddings", tie_word_embeddings, read, false},
                                          {"use_parallel_residual", use_parallel_residual, asserted, false},
                                          {"mlp_bias", mlp_bias, noted, false},
                                          {"attention_bias", attention_bias, noted},
                                          {"sliding_window", sliding_window, noted},
                                          {"qk_layernorm", none, refused}};

inline constexpr Preset kPresets[] = {{.name = "stablelm-3b-4e1t",
                                       .dtype = DType::bf16,
                                       .hidden_size = 2560,
                                       .num_hidden_layers = 32,
                                       .num_attention_heads = 32,
                                       .num_key_value_heads = 32,
                                       .intermediate_size = 6912,
                                       .vocab_size = 50304}};

inline constexpr FamilySpec kFamily = [] {
  FamilySpec f = llama::family("stablelm", "StableLmForCausalLM", kFields, kPresets);
  f.norm = NormKind::layernorm;
  f.dense_bias_as_qkv = false;
  f.rope_types = kRopeTypes;
  return f;
}();

}  // namespace cf::families::stablelm
