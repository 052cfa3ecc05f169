#pragma once
#include <array>
#include <cstdint>
#include <string_view>
#include <variant>

#include "core/view.hpp"

namespace cf {

/// A weight matrix as the checkpoint stores it, torch.nn.Linear's layout.
struct DenseWeight {
  ConstAnyView<2> weight{};  // (out, in)  f16, bf16 or f32
};

/// A matrix quantised by GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it:
///   W[n,k] = scales[g][n] * (q(k,n) - zero(g,n)),  g = g_idx[k],  zero(g,n) = stored(g,n) + zero_offset
/// A word holds 32 / bits codes, low bits first. The sum of a stored zero and the offset is not wrapped: in format v1 a
/// stored 15 is 16. With "act order" g_idx is any map of inputs to groups, otherwise g_idx[k] = k / group_size.
struct GptqWeight {
  int bits = 4;                           // 4 or 8
  std::int64_t group_size = 128;          // the last group may be shorter
  std::int32_t zero_offset = 0;           // 1 for checkpoint_format "gptq" (v1), 0 for "gptq_v2"
  View<const std::int32_t, 2> qweight{};  // (in * bits / 32, out)      packed along in
  View<const std::int32_t, 2> qzeros{};   // (groups, out * bits / 32)  packed along out
  View<const f16, 2> scales{};            // (groups, out)
  View<const std::int32_t, 1> g_idx{};    // (in)

  constexpr std::int64_t groups(std::int64_t in) const { return (in + group_size - 1) / group_size; }
  constexpr std::int64_t codes_per_word() const { return 32 / bits; }
};

/// Calls f(name, view, shape) for each tensor of a quantised matrix (out, in), by its name in checkpoints.
template <class W, class F>
void for_each_gptq_tensor(W& w, std::int64_t out, std::int64_t in, F&& f) {
  const std::int64_t groups = w.groups(in);
  f(std::string_view("qweight"), w.qweight, std::array{in / w.codes_per_word(), out});
  f(std::string_view("qzeros"), w.qzeros, std::array{groups, out / w.codes_per_word()});
  f(std::string_view("scales"), w.scales, std::array{groups, out});
  f(std::string_view("g_idx"), w.g_idx, std::array{in});
}

/// An order of a QKV product's rows in which the two elements that RoPE turns together are neighbours: each part of a
/// head (q, k or v, head_dim rows) as it is, but for the first rotary_dim rows of q and k, where rows i and rotary_dim
/// / 2 + i come at 2i and 2i + 1. Without a head_dim every row stays where it is.
struct RopePairs {
  std::int64_t head_dim = 0, rotary_dim = 0;

  template <class Int>
  constexpr Int row(Int r) const {
    if (head_dim == 0) return r;
    const Int c = r % Int(head_dim), half = Int(rotary_dim / 2);
    return r / Int(head_dim) % 3 < 2 && c < 2 * half ? r - c + c / 2 + c % 2 * half : r;
  }
  bool operator==(const RopePairs&) const = default;
};

/// A GptqWeight repacked for tensor cores by repack_gptq() (core/gptq_tiles.hpp), which describes the layout. All views
/// are those of 4-byte words. Only the CUDA backend multiplies by it.
struct GptqTiles {
  int bits = 4;                 // of the GptqWeight
  std::int64_t group_size = 0;  // of the GptqWeight
  std::int64_t columns_per_group = 0;
  RopePairs pairs{};                     // the order of the rows; ln_qkv takes that of its heads, linear any
  View<const std::int32_t, 3> codes{};   // (ceil(out / 16), ceil(columns / 64), 128)
  View<const std::int32_t, 3> scales{};  // (ceil(out / 16), groups, 16)  a float16 scale and a 16-bit zero each
  View<const std::int32_t, 1>
      order{};  // (columns)  the input of each column, -1 for none; or empty: column k is input k
};

using LinearWeight = std::variant<DenseWeight, GptqWeight, GptqTiles>;

/// How many bytes a matrix takes, for what a product must read.
struct WeightFormat {
  int bits = 0;  // of a GPTQ code; 0 for a dense weight
  std::int64_t group_size = 0;

  /// g_idx is not counted: where it is more than k / group_size, a permutation of the inputs stands for it.
  constexpr double bytes(std::int64_t out, std::int64_t in, DType dense) const {
    const double elements = double(out) * double(in);
    if (bits == 0) return elements * double(size_bytes(dense));
    const double zeros_and_scales = bits / 8.0 + double(size_bytes(DType::f16));
    return elements * bits / 8 + double((in + group_size - 1) / group_size) * double(out) * zeros_and_scales;
  }
};

inline WeightFormat format_of(const LinearWeight& w) {
  if (const auto* gptq = std::get_if<GptqWeight>(&w)) return {gptq->bits, gptq->group_size};
  if (const auto* tiles = std::get_if<GptqTiles>(&w)) return {tiles->bits, tiles->group_size};
  return {};
}

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
