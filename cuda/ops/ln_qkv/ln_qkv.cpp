#include "cuda/ops/ln_qkv/ln_qkv.hpp"

#include "core/fp8.hpp"
#include "cuda/ops/appended_row.hpp"
#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {
namespace {

/// The refusal of a hidden that no plan has room for.
Status too_wide(std::string_view op, std::int64_t hidden) {
  return Status::error(Code::unimplemented, std::string(op) + ": cuda takes hidden up to " +
                                                std::to_string(kMaxLnQkvHidden) +
                                                " that fits a block's shared memory, got " + std::to_string(hidden));
}

template <class Args>
Status check(const Args& a) {
  CF_TRY(check_equal_runs(a));
  if constexpr (requires { a.k_cache; }) CF_TRY(check_cache_rows(a));
  const auto d = Args::Op::dims(a);
  CF_TRY(check_multiple_of_8(Args::Op::name, "hidden", d.hidden));
  return check_multiple_of_8(Args::Op::name, "head_dim", d.head_dim);
}

template <class Args>
Result<LnQkvPacked> packed_plan(const Target& target, const Args& a) {
  constexpr std::string_view name = Args::Op::name;
  const auto* const packed = std::get_if<PackedWeight>(&a.linear.weight);
  if (!packed || is_fp8(a.linear.weight)) return not_taken("packed GPTQ weights", "another weight");
  CF_TRY(check(a));
  const auto d = Args::Op::dims(a);
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(name, *packed));
  const RopePairs pairs = pack_hint(a).pairs;
  if (layout.pairs != pairs)
    return Status::error(Code::unimplemented,
                         std::string(name) + ": cuda takes packed GPTQ weights with rows in " +
                             (pairs == RopePairs{} ? "their own order" : "the order of its heads' pairs"));
  CF_TRY(check_gptq_activation(name, a.x.dtype));
  LnQkvPacked made{.layout = layout, .sizes = gptq_sizes(layout, d.tokens()), .launches = {}};
  for (std::int64_t first = 0; first < d.tokens(); first += made.launches.back().product.tokens) {
    made.launches.push_back(ln_qkv_gptq_plan(target.arch, made.sizes, d.hidden, d.tokens() - first,
                                             std::int64_t(size_bytes(a.norm.gamma.dtype))));
    if (made.launches.back().product.grid == 0) return too_wide(name, d.hidden);
  }
  return made;
}

template <class Args>
Result<LnQkvDense> dense_plan(const Target& target, const Args& a) {
  constexpr std::string_view name = Args::Op::name;
  if (is_fp8(a.linear.weight)) return not_taken("dense weights", "an fp8 one");
  if (std::holds_alternative<PackedWeight>(a.linear.weight)) return not_taken("dense weights", "a packed one");
  CF_TRY(check(a));
  const auto d = Args::Op::dims(a);
  const auto* const dense = std::get_if<DenseWeight>(&a.linear.weight);
  if (!dense) return unpacked_gptq(name);
  CF_TRY(check_activation(name, a.x.dtype));
  if (a.x.dtype != DType::f32) CF_TRY(check_weight_dtype(name, a.x.dtype, dense->weight.dtype));
  const LnQkvPlan plan = ln_qkv_plan(target.arch, d.hidden, d.out(), d.tokens(), std::int64_t(size_bytes(a.x.dtype)),
                                     std::int64_t(size_bytes(a.norm.gamma.dtype)));
  if (plan.tokens == 0) return too_wide(name, d.hidden);
  return LnQkvDense{plan};
}

}  // namespace

Result<LnQkvPacked> plan_ln_qkv_packed(const Target& target, const ops::LnQkv::Args& a) {
  return packed_plan(target, a);
}
Result<LnQkvDense> plan_ln_qkv_dense(const Target& target, const ops::LnQkv::Args& a) { return dense_plan(target, a); }
Result<LnQkvPacked> plan_ln_qkv_heads_packed(const Target& target, const ops::LnQkvHeads::Args& a) {
  return packed_plan(target, a);
}
Result<LnQkvDense> plan_ln_qkv_heads_dense(const Target& target, const ops::LnQkvHeads::Args& a) {
  return dense_plan(target, a);
}

}  // namespace cf::cuda
