#pragma once
#include <cstdint>
#include <variant>

#include "core/view.hpp"

namespace cf {

/// A weight matrix as the checkpoint stores it, torch.nn.Linear's layout.
struct DenseWeight {
  ConstAnyView<2> weight{};  // (out, in)  f16, bf16 or f32
};

/// A matrix quantised by GPTQ, as AutoGPTQ and GPTQModel store it; W[n,k] = scales[g][n] * (q(k,n) - zero(g,n)) with
/// g = g_idx[k]. The backends that cannot run it say so through Code::unimplemented.
struct GptqWeight {
  int bits = 4;
  std::int64_t group_size = 128;
  View<const std::int32_t, 2> qweight{};  // (in * bits / 32, out)      packed along in, low bits first
  View<const std::int32_t, 2> qzeros{};   // (groups, out * bits / 32)  packed along out
  View<const f16, 2> scales{};            // (groups, out)
  View<const std::int32_t, 1> g_idx{};    // (in)
};

using LinearWeight = std::variant<DenseWeight, GptqWeight>;

/// A torch.nn.Linear. An empty bias means that there is none.
struct LinearParams {
  LinearWeight weight{};
  ConstAnyView<1> bias{};  // (out)
};

struct NormParams {
  ConstAnyView<1> gamma{};  // (hidden)  "weight" in checkpoints
  ConstAnyView<1> beta{};   // (hidden)  "bias" in checkpoints
};

/// One GPT-NeoX layer's parameters, named after Hugging Face's modules.
struct LayerWeights {
  NormParams input_layernorm{};
  NormParams post_attention_layernorm{};
  LinearParams query_key_value{};  // (3 * hidden, hidden), rows head * 3 * head_dim + {0, head_dim, 2 * head_dim} + d
  LinearParams dense{};            // (hidden, hidden)
  LinearParams dense_h_to_4h{};    // (intermediate, hidden)
  LinearParams dense_4h_to_h{};    // (hidden, intermediate)
};

}  // namespace cf
