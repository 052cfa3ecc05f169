#pragma once
#include <cstdint>

namespace cf {

/// A family of models: config.json's model_type. The enumerators are the lines of families.def (family.hpp).
enum class ModelType : std::uint8_t;

/// The norms that a layer may have: ops::LayerNorm, ops::RmsNorm. RMSNorm has no beta.
enum class NormKind : std::uint8_t { layernorm, rmsnorm };

/// gelu_erf: x/2 (1 + erf(x/sqrt 2)), Hugging Face's "gelu".
/// gelu_tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), its "gelu_new", "gelu_fast" and "gelu_pytorch_tanh".
/// swiglu: silu(gate(x)) * up(x) of two products, Hugging Face's "silu" with gate_proj and up_proj.
enum class Activation : std::uint8_t { gelu_erf, gelu_tanh, swiglu };

/// parallel:   out = x + attention(norm1(x)) + mlp(norm2(x))
/// sequential: h = x + attention(norm1(x)),  out = h + mlp(norm2(h))
enum class Residual : std::uint8_t { parallel, sequential };

/// How a token's position enters.
///   rope     the heads of q and k are rotated by angles of the position
///   learned  a table's row of the position is added to the token's embedding; nothing is rotated
enum class Positions : std::uint8_t { rope, learned };

}  // namespace cf
