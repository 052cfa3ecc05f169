#pragma once
#include "core/families/qwen2.hpp"

/// Qwen3, dense (arXiv:2505.09388): Llama's layer, with an RMSNorm of each head of q and of k before RoPE. Source:
/// transformers' Qwen3Config and Qwen3Model.
namespace cf::families::qwen3 {

constexpr ModelNames with_head_norms(ModelNames names) {
  names.qk_norm = {"self_attn.qk_norm", "self_attn.qk_norm", SiteId::qk_norm};
  names.q_norm = {"self_attn.q_norm", ""};
  names.k_norm = {"self_attn.k_norm", ""};
  return names;
}

using enum ConfigKey;
using enum FieldUse;

/// head_dim does not follow from other sizes.
inline constexpr auto kFields = joined(with_field(qwen2::kCommonFields, {"head_dim", head_dim, read, 128}),
                                       std::array{ConfigField{"attention_bias", attention_bias, read, false}});

constexpr Preset preset(std::string_view name, std::int64_t hidden, std::int64_t layers, std::int64_t heads,
                        std::int64_t intermediate, bool tied) {
  return {.name = name,
          .dtype = DType::bf16,
          .hidden_size = hidden,
          .num_hidden_layers = layers,
          .num_attention_heads = heads,
          .num_key_value_heads = 8,
          .head_dim = 128,
          .intermediate_size = intermediate,
          .vocab_size = 151936,
          .max_position_embeddings = 40960,
          .rope_theta = 1e6,
          .tie_word_embeddings = tied};
}
inline constexpr Preset kPresets[] = {
    preset("qwen3-0.6b", 1024, 28, 16, 3072, true), preset("qwen3-1.7b", 2048, 28, 16, 6144, true),
    preset("qwen3-4b", 2560, 36, 32, 9728, true), preset("qwen3-8b", 4096, 36, 32, 12288, false)};

inline constexpr FamilySpec kFamily = [] {
  FamilySpec f = llama::family("qwen3", "Qwen3ForCausalLM", kFields, kPresets);
  f.names = with_head_norms(f.names);
  f.head_norm = true;
  return f;
}();

}  // namespace cf::families::qwen3
