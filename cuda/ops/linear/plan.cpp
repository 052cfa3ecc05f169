// What each of linear's kernels takes, and why it leaves a call to those behind it in kernels.def.
#include <limits>
#include <utility>

#include "cuda/ops/linear/linear.hpp"
#include "cuda/ops/linear/wgmma/sum.hpp"
#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {
namespace {

/// Why a kernel leaves a call to others. Ok where there is no reason.
Status leave(std::string_view why) { return why.empty() ? Status() : Status::error(Code::not_found, std::string(why)); }

/// What no kernel of dense weights takes.
Status check_dense(const ops::Linear::Args& a) {
  const auto* const dense = std::get_if<DenseWeight>(&a.linear.weight);
  if (!dense) return leave("takes dense weights");
  CF_TRY(check_multiple_of_8(ops::Linear::name, "in", ops::Linear::dims(a).in));
  CF_TRY(check_activation(ops::Linear::name, a.x.dtype));
  return a.x.dtype == DType::f32 ? Status() : check_weight_dtype(ops::Linear::name, a.x.dtype, dense->weight.dtype);
}

/// Whether there are so many bytes of scratch memory.
Status check_scratch(const Target& target, std::size_t bytes) {
  if (!target.scratch.data) return leave("needs scratch memory");
  if (reinterpret_cast<std::uintptr_t>(target.scratch.data) % 256)
    return bad_argument(ops::Linear::name, "the scratch memory is misaligned, expected a multiple of 256 bytes");
  return leave(target.scratch.bytes >= bytes ? ""
                                             : "needs " + std::to_string(bytes) + " B of scratch memory, got " +
                                                   std::to_string(target.scratch.bytes));
}

/// The packed weight, and how it is laid out.
struct PackedMatrix {
  const PackedWeight* weight;
  GptqLayout layout;
};
Result<PackedMatrix> packed_of(const ops::Linear::Args& a) {
  if (std::holds_alternative<DenseWeight>(a.linear.weight) || is_fp8(a.linear.weight))
    return leave("takes packed GPTQ weights");
  const auto* const packed = std::get_if<PackedWeight>(&a.linear.weight);
  if (!packed) return unpacked_gptq(ops::Linear::name);
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, *packed));
  return PackedMatrix{packed, layout};
}

/// The fp8 weight.
Result<Fp8Weight> fp8_weight_of(const ops::Linear::Args& a) {
  if (!is_fp8(a.linear.weight)) return leave("takes fp8 weights");
  const auto& packed = std::get<PackedWeight>(a.linear.weight);
  CF_TRY(check_fp8(ops::Linear::name, packed));
  CF_TRY(check_activation(ops::Linear::name, a.x.dtype));
  const Fp8Weight w = fp8_of(packed);
  CF_TRY(check_multiple_of_8(ops::Linear::name, "in", w.in));
  if (w.groups() > 1) CF_TRY(check_multiple_of_8(ops::Linear::name, "fp8 groups of", w.group_size));
  if (w.out * w.in > std::numeric_limits<std::int32_t>::max())
    return Status::error(Code::unimplemented, "linear: cuda takes fp8 weights of fewer than 2^31 elements, got " +
                                                  std::to_string(w.out * w.in));
  return w;
}

/// What packed's plan depends on.
GptqSizes packed_sizes(const Target& target, const ops::Linear::Args& a, const GptqLayout& layout) {
  GptqSizes sizes = gptq_sizes(layout, a.x.shape[0]);
  // The kernel of one token has another order of sums than those of several.
  if (target.arch.tuning->is_invariant()) sizes.one_token = false;
  // The kernel of quads finishes four rows at once.
  sizes.in_quads = sizes.in_quads && gptq_is_plain(a, layout, {}, 4);
  return sizes;
}

/// What Hopper's tensor cores do not take of a packed weight beside its sizes.
Status check_packed_on_wgmma(const Target& target, const ops::Linear::Args& a, const GptqLayout& layout) {
  if (layout.pairs != RopePairs{} && (a.residual || a.epilogue == ops::Epilogue::swiglu))
    return leave("takes rows in RoPE's order without residual and gates");
  const std::size_t bytes = packed_columns_bytes(layout, a.x.shape[0]);
  return bytes == 0 ? Status() : check_scratch(target, bytes);
}

/// cuBLASLt's plan, for a dense or a packed weight.
Result<GemmPlan> plan_gemm(const Target& target, const ops::Linear::Args& a, bool fits_dtype) {
  const auto d = ops::Linear::dims(a);
  CF_TRY(leave(
      why_no_gemm(target.arch, d.tokens, d.in, a.x.dtype, std::holds_alternative<PackedWeight>(a.linear.weight))));
  if (!fits_dtype) return leave("takes weights within float16's range");
  const GemmPlan plan = gemm_plan(a);
  CF_TRY(check_scratch(target, plan.at.bytes));
  if (!target.has_gemm()) return leave("needs cuBLASLt");
  return plan;
}

}  // namespace

Result<LinearWgmmaPlan> plan_wgmma(const Target& target, const ops::Linear::Args& a) {
  CF_TRY(check_dense(a));
  const auto d = ops::Linear::dims(a);
  CF_TRY(leave(target.has_wgmma ? why_no_linear_wgmma(target.arch, d.tokens, d.in, d.rows(), a.x.dtype) : kNoWgmma));
  LinearWgmmaPlan plan = linear_wgmma_plan(target.arch, d.tokens, d.in, d.rows());
  if (!target.arch.tuning->is_invariant()) return plan;
  // Without splits its sums are those of tiles, which takes more tokens.
  CF_TRY(leave(ops::is_gelu(a.epilogue) ? "" : "takes products with GELU of an invariant model"));
  plan.splits = 1;
  return plan;
}

Result<LinearSumWgmmaPlan> plan_linear_sum_wgmma(const Target& target, const ops::LinearSum::Args& a) {
  if (target.arch.tuning->is_invariant()) return leave("takes classes of step sizes");
  CF_TRY(ops::LinearSum::for_each_part(
      a, [&](const ops::Linear::Args& part) { return plan_wgmma(target, part).status(); }));
  const auto d = ops::LinearSum::dims(a);
  const LinearSumWgmmaPlan plan = linear_sum_wgmma_plan(target.arch, d.tokens, d.in, d.in2, d.out);
  CF_TRY(leave(plan.first.splits > plan.second.splits               ? "takes a first product of no more splits"
               : plan.smem_bytes > target.arch.smem_per_block_bytes ? "takes sums that fit a block's shared memory"
                                                                    : ""));
  return plan;
}

Result<LinearTilesPlan> plan_tiles(const Target& target, const ops::Linear::Args& a) {
  CF_TRY(check_dense(a));
  const auto d = ops::Linear::dims(a);
  CF_TRY(leave(target.has_wgmma ? why_no_linear_tiles(target.arch, d.tokens, d.in, d.out, a.x.dtype, a.epilogue)
                                : kNoWgmma));
  return linear_tiles_plan(target.arch, d.tokens, d.out);
}

Result<GemmPlan> plan_cublaslt(const Target& target, const ops::Linear::Args& a) {
  CF_TRY(check_dense(a));
  return plan_gemm(target, a, true);
}

Result<GemvLaunches> plan_gemv(const Target& target, const ops::Linear::Args& a) {
  CF_TRY(check_dense(a));
  const auto d = ops::Linear::dims(a);
  GemvLaunches all;
  CF_TRY(for_each_gemv_launch(d.tokens, [&](std::int64_t first, std::int64_t tokens) {
    all.launches.push_back(
        {first, tokens,
         a.x.dtype == DType::f32 ? gemv_f32_plan(d.out) : gemv_plan(target.arch, d.in, d.rows(), tokens)});
    return Status();
  }));
  return all;
}

Result<WgmmaPackedPlan> plan_wgmma_packed(const Target& target, const ops::Linear::Args& a) {
  CF_TRY_ASSIGN(const PackedMatrix m, packed_of(a));
  const auto d = ops::Linear::dims(a);
  CF_TRY(leave(target.has_wgmma ? why_no_wgmma_packed(target.arch, d.tokens, d.in, d.rows(), a.x.dtype) : kNoWgmma));
  if (!m.layout.has_order && gptq_wide_comes_first(target.arch, packed_sizes(target, a, m.layout), d.tokens))
    return leave("takes more tokens");
  CF_TRY(check_packed_on_wgmma(target, a, m.layout));
  return wgmma_packed_plan(target.arch, m.layout, d.tokens, d.rows());
}

Result<PackedTilesPlan> plan_tiles_packed(const Target& target, const ops::Linear::Args& a) {
  CF_TRY_ASSIGN(const PackedMatrix m, packed_of(a));
  const auto d = ops::Linear::dims(a);
  CF_TRY(leave(target.has_wgmma ? why_no_tiles_packed(target.arch, d.tokens, d.in, d.rows(), a.x.dtype) : kNoWgmma));
  CF_TRY(check_packed_on_wgmma(target, a, m.layout));
  const PackedTilesPlan plan = packed_tiles_plan(target.arch, m.layout, d.tokens, d.rows());
  if (plan.parked_bytes() == 0 || check_scratch(target, plan.scratch_bytes())) return plan;
  return packed_tiles_plan(target.arch, m.layout, d.tokens, d.rows(), false);
}

Result<GemmPlan> plan_cublaslt_packed(const Target& target, const ops::Linear::Args& a) {
  CF_TRY_ASSIGN(const PackedMatrix m, packed_of(a));
  return plan_gemm(target, a, a.x.dtype != DType::f16 || m.layout.fits_f16);
}

Result<PackedLaunches> plan_packed(const Target& target, const ops::Linear::Args& a) {
  CF_TRY_ASSIGN(const PackedMatrix m, packed_of(a));
  if (a.epilogue == ops::Epilogue::swiglu && m.layout.pairs != RopePairs{})
    return Status::error(Code::unimplemented,
                         "linear: cuda takes rows that are packed in order with Epilogue::swiglu, got RoPE's order");
  CF_TRY(with_gptq_activation(ops::Linear::name, a.x.dtype, [](auto) { return Status(); }));
  const std::int64_t tokens = ops::Linear::dims(a).tokens;
  const GptqSizes sizes = packed_sizes(target, a, m.layout);
  PackedLaunches all;
  CF_TRY(for_each_gptq_launch(target.arch, sizes, tokens, [&](std::int64_t first, const GptqPlan& plan) {
    all.launches.push_back({first, plan.tokens, plan});
    return Status();
  }));
  return all;
}

Result<Fp8TilesPlan> plan_tiles_fp8(const Target& target, const ops::Linear::Args& a) {
  CF_TRY_ASSIGN(const Fp8Weight w, fp8_weight_of(a));
  CF_TRY(leave(why_no_fp8_mma(w, a.x.dtype)));
  const std::int64_t tokens = ops::Linear::dims(a).tokens;
  CF_TRY(leave(tokens <= target.arch.tuning->fp8_tokens ? "takes more tokens" : ""));
  return fp8_tiles_plan(tokens, w.out);
}

Result<GemvLaunches> plan_gemv_fp8(const Target& target, const ops::Linear::Args& a) {
  CF_TRY_ASSIGN(const Fp8Weight w, fp8_weight_of(a));
  const bool on_tensor_cores = why_no_fp8_mma(w, a.x.dtype).empty();
  GemvLaunches all;
  CF_TRY(for_each_gemv_launch(ops::Linear::dims(a).tokens, [&](std::int64_t first, std::int64_t tokens) {
    all.launches.push_back(
        {first, tokens,
         on_tensor_cores ? fp8_gemv_plan(target.arch, w.out, tokens) : gemv_f32_plan(ops::Linear::dims(a).out)});
    return Status();
  }));
  return all;
}

}  // namespace cf::cuda
