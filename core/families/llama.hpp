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

inline constexpr ActivationName kActivations[] = {{"silu", Activation::swiglu}, {"swish", Activation::swiglu}};
inline constexpr std::string_view kRopeTypes[] = {"default", "llama3"};

using enum ConfigKey;
using enum FieldUse;

/// What Mistral and Qwen read as well, and what none of them has.
inline constexpr std::array<ConfigField, 25> kCommonFields{
    {{"hidden_size", hidden_size, required},
     {"num_hidden_layers", num_hidden_layers, required},
     {"num_attention_heads", num_attention_heads, required},
     {"intermediate_size", intermediate_size, required},
     {"vocab_size", vocab_size, required},
     {"head_dim", head_dim, read_or_null},
     {"rms_norm_eps", layer_norm_eps, read, 1e-6},
     {"hidden_act", hidden_act, read, "silu"},
     {"rope_theta", rope_theta, read, 10000.0},
     {"partial_rotary_factor", rotary_fraction, asserted, 1.0},
     {"original_max_position_embeddings", original_max_position_embeddings, read},
     {"layer_types", layer_types, read_or_null},
     {"tie_word_embeddings", tie_word_embeddings, read, false},
     {"use_parallel_residual", use_parallel_residual, noted, false},
     {"rotary_emb_base", rope_theta, noted},
     {"rotary_pct", rotary_fraction, noted},
     {"attention_sinks", none, refused},
     {"attn_logit_softcapping", none, refused},
     {"n_routed_experts", none, refused},
     {"num_experts", none, refused},
     {"num_local_experts", none, refused},
     {"qk_layernorm", none, refused},
     {"qk_norm", none, refused},
     {"use_attention_sink", none, refused},
     {"use_qk_norm", none, refused}}};

inline constexpr auto kFields = joined(
    kCommonFields,
    std::array{ConfigField{"num_key_value_heads", num_key_value_heads, read, SizeOf{num_attention_heads}},
               ConfigField{"max_position_embeddings", max_position_embeddings, read, 2048},
               ConfigField{"attention_bias", attention_bias, read, false},
               ConfigField{"mlp_bias", mlp_bias, read, false}, ConfigField{"sliding_window", sliding_window, noted}});

/// Llama 3's scaling of RoPE.
constexpr ops::RopeScaling scaled_by(double factor) {
  return {.kind = ops::RopeScaling::Kind::llama3,
          .factor = factor,
          .low_freq_factor = 1,
          .high_freq_factor = 4,
          .original_max_positions = 8192};
}

/// llama-2.8b-shape is no published model, but a Llama of about as many bytes as Pythia-2.8B.
inline constexpr Preset kPresets[] = {{.name = "llama-2-7b",
                                       .hidden_size = 4096,
                                       .num_hidden_layers = 32,
                                       .num_attention_heads = 32,
                                       .num_key_value_heads = 32,
                                       .intermediate_size = 11008,
                                       .vocab_size = 32000,
                                       .max_position_embeddings = 4096,
                                       .layer_norm_eps = 1e-5},
                                      {.name = "llama-3.2-1b",
                                       .dtype = DType::bf16,
                                       .hidden_size = 2048,
                                       .num_hidden_layers = 16,
                                       .num_attention_heads = 32,
                                       .num_key_value_heads = 8,
                                       .intermediate_size = 8192,
                                       .vocab_size = 128256,
                                       .max_position_embeddings = 131072,
                                       .rope_theta = 5e5,
                                       .layer_norm_eps = 1e-5,
                                       .rope_scaling = scaled_by(32),
                                       .tie_word_embeddings = true},
                                      {.name = "llama-3.2-3b",
                                       .dtype = DType::bf16,
                                       .hidden_size = 3072,
                                       .num_hidden_layers = 28,
                                       .num_attention_heads = 24,
                                       .num_key_value_heads = 8,
                                       .intermediate_size = 8192,
                                       .vocab_size = 128256,
                                       .max_position_embeddings = 131072,
                                       .rope_theta = 5e5,
                                       .layer_norm_eps = 1e-5,
                                       .rope_scaling = scaled_by(32),
                                       .tie_word_embeddings = true},
                                      {.name = "llama-3.1-8b",
                                       .dtype = DType::bf16,
                                       .hidden_size = 4096,
                                       .num_hidden_layers = 32,
                                       .num_attention_heads = 32,
                                       .num_key_value_heads = 8,
                                       .intermediate_size = 14336,
                                       .vocab_size = 128256,
                                       .max_position_embeddings = 131072,
                                       .rope_theta = 5e5,
                                       .layer_norm_eps = 1e-5,
                                       .rope_scaling = scaled_by(8)},
                                      {.name = "llama-3.1-70b",
                                       .dtype = DType::bf16,
                                       .hidden_size = 8192,
                                       .num_hidden_layers = 80,
                                       .num_attention_heads = 64,
                                       .num_key_value_heads = 8,
                                       .intermediate_size = 28672,
                                       .vocab_size = 128256,
                                       .max_position_embeddings = 131072,
                                       .rope_theta = 5e5,
                                       .layer_norm_eps = 1e-5,
                                       .rope_scaling = scaled_by(8)},
                                      {.name = "llama-2.8b-shape",
                                       .hidden_size = 2560,
                                       .num_hidden_layers = 32,
                                       .num_attention_heads = 20,
                                       .num_key_value_heads = 20,
                                       .intermediate_size = 6848,
                                       .vocab_size = 50304,
                                       .max_position_embeddings = 2048,
                                       .layer_norm_eps = 1e-5}};

/// A family with Llama's names, stored parts and arithmetic.
constexpr FamilySpec family(std::string_view model_type, std::string_view class_name,
                            std::span<const ConfigField> fields, std::span<const Preset> presets = {}) {
  return {.model_type = model_type,
          .class_name = class_name,
          .names = kNames,
          .stored = kStored,
          .buffers = kBuffers,
          .norm = NormKind::rmsnorm,
          .activations = kActivations,
          .activation_module = "mlp.act_fn",
          .rope_types = kRopeTypes,
          .fields = fields,
          .presets = presets};
}
inline constexpr FamilySpec kFamily = family("llama", "LlamaForCausalLM", kFields, kPresets);

}  // namespace cf::families::llama
