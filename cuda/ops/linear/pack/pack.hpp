#pragma once
// Weights in the layout of CUDA's kernels.
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/ops/ln_qkv.hpp"
#include "core/ops/rms_qkv.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"
#include "cuda/ops/linear/pack/format.hpp"

namespace cf::cuda {

class Context;

/// The RopePairs of the heads of a product of q, k and v.
constexpr RopePairs rope_pairs(const ops::QkvHeads& qkv, std::int64_t head_dim, std::int64_t rotary_dim) {
  return {head_dim, rotary_dim, qkv.layout == ops::QkvLayout::separate ? qkv.heads + qkv.kv_heads : 0};
}

/// What the op that will multiply by a weight asks of the packed layout.
struct PackHint {
  RopePairs pairs{};  // the order of the rows: ln_qkv and rms_qkv want that of their heads, every other op none
};

/// The hint for the weight of an op's call.
template <class Args>
PackHint pack_hint(const Args& args) {
  if constexpr (std::is_same_v<Args, ops::LnQkv::Args>)
    return {.pairs = {args.q.shape[2], 2 * args.cos.shape[1]}};
  else if constexpr (std::is_same_v<Args, ops::RmsQkv::Args>)
    return {.pairs = rope_pairs({args.q.shape[1], args.k_cache.shape[1], ops::QkvLayout::separate}, args.q.shape[2],
                                2 * args.cos.shape[1])};
  else
    return {};
}

/// A weight as CUDA's kernels take it.
struct Packed {
  LinearWeight weight;
  Tensor storage;  // host memory of a PackedWeight's block; empty for a weight that passed through
};

/// The packer's name in a PackedWeight.
inline constexpr std::string_view kCudaPacker = "cf::cuda::pack()";

/// Packs a weight whose tensors lie on the host: once, when a model is loaded. A GptqWeight becomes a PackedWeight in
/// host memory, which the caller copies to a device. Dense and packed weights pass through unchanged.
/// Refuses GPTQ tensors that do not fit each other, a g_idx outside the groups, and scales of 8-bit codes that are too
/// large for a float16 once multiplied by 16.
Result<Packed> pack(const LinearWeight& weight, const PackHint& hint = {});

/// Checks what pack() asks of a GptqWeight's shapes, and reads no element.
Status check_packable(const GptqWeight& weight);

/// pack() for tensors that lie on the host or on a device: GPTQ tensors on a device are copied to the host first.
Result<Packed> pack(const LinearWeight& weight, const PackHint& hint, const Context& context);

/// Packs the weight of a call in place, where the op has one. `packed` then owns the weight's memory.
template <class Args>
Status pack_call(Args& args, Packed& packed) {
  if constexpr (requires { args.linear; }) {
    CF_TRY_ASSIGN(Packed made, pack(args.linear.weight, pack_hint(args)));
    packed = std::move(made);
    args.linear.weight = packed.weight;
  }
  return {};
}

/// The sizes of a packed GPTQ matrix's parts.
struct GptqLayout {
  std::int32_t row_tiles = 0, chunks = 0, groups = 0, columns_per_group = 0, inputs = 0;
  bool has_order = false;
  bool in_order = false;  // column k of a plane of codes is input k; 8-bit codes have an order even so
  bool fits_f16 = false;  // every weight lies within float16's range
  RopePairs pairs{};      // packed row r is the matrix's row pairs.row(r)

  constexpr std::int64_t code_words() const { return std::int64_t(row_tiles) * chunks * (kGptqTileBytes / 4); }
  constexpr std::int64_t scale_words() const { return std::int64_t(row_tiles) * groups * kGptqRows; }
  constexpr std::int64_t order_words() const { return has_order ? std::int64_t(chunks) * kGptqColumns : 0; }
  constexpr std::int64_t inverse_words() const { return in_order ? 0 : inputs; }
  constexpr std::int64_t words() const { return code_words() + scale_words() + order_words() + inverse_words(); }
  /// The parts within the matrix's block.
  const std::int32_t* codes(const PackedWeight& w) const { return w.data.data; }
  const std::int32_t* scales(const PackedWeight& w) const { return codes(w) + code_words(); }
  const std::int32_t* order(const PackedWeight& w) const { return has_order ? scales(w) + scale_words() : nullptr; }
};

/// The layout of a packed weight, for an op whose name messages begin with. Refuses a weight that another packer made
/// (Code::unimplemented), and a block of another size than the layout's.
Result<GptqLayout> gptq_layout(std::string_view op, const PackedWeight& weight);

}  // namespace cf::cuda
