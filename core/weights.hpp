#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "core/tensor_spec.hpp"
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

/// Calls f(spec, view, shape) for each tensor of a quantised matrix (out, in), by its name in checkpoints.
template <class W, class F>
void for_each_gptq_tensor(W& w, std::int64_t out, std::int64_t in, F&& f) {
  const std::int64_t groups = w.groups(in);
  f(TensorSpec{Role::gptq, "qweight"}, w.qweight, extents(in / w.codes_per_word(), out));
  f(TensorSpec{Role::gptq, "qzeros"}, w.qzeros, extents(groups, out / w.codes_per_word()));
  f(TensorSpec{Role::gptq, "scales"}, w.scales, extents(groups, out));
  f(TensorSpec{Role::gptq, "g_idx"}, w.g_idx, extents(in));
}

/// How a matrix is stored: enough to count the bytes that a product must read.
struct WeightFormat {
  int bits = 0;  // of a code; 0 for a dense weight
  std::int64_t group_size = 0;
  bool is_fp8 = false;  // the codes are float8 numbers with float32 scales, those of fp8.hpp; otherwise GPTQ's

  /// g_idx is not counted: kernels do not read it. At most they read a permutation of the inputs in its place.
  constexpr double bytes(std::int64_t out, std::int64_t in, DType dense) const {
    const double elements = double(out) * double(in);
    if (bits == 0) return elements * double(size_bytes(dense));
    const double zeros_and_scales =
        is_fp8 ? double(size_bytes(DType::f32)) : bits / 8.0 + double(size_bytes(DType::f16));
    return elements * bits / 8 + double((in + group_size - 1) / group_size) * double(out) * zeros_and_scales;
  }
};

/// A matrix in the layout of one backend's kernels, as that backend's pack() made it. The packer alone reads `data` and
/// `layout`; every other backend refuses the matrix by the packer's name.
struct PackedWeight {
  std::string_view packer{};           // whose pack() made it
  WeightFormat format{};               // of the matrix before it was packed
  std::int64_t out = 0, in = 0;        // the matrix is (out, in)
  View<const std::int32_t, 1> data{};  // (words)  one block, on the host or on a device
  std::array<std::byte, 64> layout{};  // the packer's description of the block
};

using LinearWeight = std::variant<DenseWeight, GptqWeight, PackedWeight>;

inline WeightFormat format_of(const LinearWeight& w) {
  if (const auto* gptq = std::get_if<GptqWeight>(&w)) return {gptq->bits, gptq->group_size};
  if (const auto* packed = std::get_if<PackedWeight>(&w)) return packed->format;
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

}  // namespace cf
