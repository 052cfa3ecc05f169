#include "cuda/ops/rms_linear/rms_linear.hpp"

#include "core/fp8.hpp"
#include "cuda/ops/appended_row.hpp"
#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {
namespace {

/// The plan for a weight whose rows are in the order of `pairs`, and y (tokens, out).
template <class Args>
Result<GptqPlan> plan_of(const Target& target, const Args& a, const AnyView<2>& y, ops::Epilogue epilogue,
                         const RopePairs& pairs) {
  constexpr std::string_view name = Args::Op::name;
  const auto& [tokens, hidden] = a.x.shape;
  const auto* const weight = std::get_if<PackedWeight>(&a.linear.weight);
  if (!weight || is_fp8(a.linear.weight)) return not_taken("packed GPTQ weights", "another weight");
  CF_TRY(check_gptq_activation(name, a.x.dtype));
  if (tokens != 1) return not_taken("one token", std::to_string(tokens));
  if (target.arch.tuning->is_invariant()) return not_taken("classes of step sizes", "one class");
  CF_TRY(check_multiple_of_8(name, "hidden", hidden));
  if (a.gamma.dtype != a.x.dtype)
    return not_taken("a gamma of the activations' dtype", std::string(to_string(a.gamma.dtype)));
  // Other plans of rmsnorm add a row's squares up in another order.
  if (layernorm_plan(target.arch, tokens, hidden, 1).elements != 8)
    return not_taken("rows that rmsnorm gives eight elements a thread", std::to_string(hidden) + " elements");
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(name, *weight));
  if (!gptq_is_plain({.x = a.x, .linear = a.linear, .y = y, .epilogue = epilogue}, layout, pairs, kRmsRows))
    return not_taken("rows in the op's order and of an even number, and a bias of y's dtype", "others");
  const GptqSizes sizes = gptq_sizes(layout, tokens);
  if (!sizes.one_token) return not_taken("weights that the kernels of one token take", "others");
  // However many tiles there are, one stage alone is requested early. All warps wait for the token, whose loads queue
  // behind early stages.
  const GptqPlan plan = gptq_plan(target.arch, sizes, tokens, kLinearGptqTurns, kLinearGptqBlocksPerSm,
                                  {.bytes = kRmsStaticBytes}, target.arch.tuning->packed_ahead);
  if (plan.grid == 0) return not_taken("products whose columns fit one cluster", std::to_string(hidden) + " columns");
  return plan;
}

}  // namespace

Result<GptqPlan> plan_rms_linear(const Target& target, const ops::RmsLinear::Args& a) {
  return plan_of(target, a, a.y, a.epilogue, {});
}

Result<GptqPlan> plan_rms_qkv(const Target& target, const ops::RmsQkv::Args& a) {
  CF_TRY(check_equal_runs(a));
  CF_TRY(check_cache_rows(a));
  const auto d = ops::RmsQkv::dims(a);
  CF_TRY(check_multiple_of_8(ops::RmsQkv::name, "head_dim", d.head_dim));
  const AnyView<2> w(nullptr, {d.tokens(), d.out()}, a.x.dtype);
  return plan_of(target, a, w, ops::Epilogue::none, rope_pairs(d.qkv(), d.head_dim, d.rotary_dim));
}

}  // namespace cf::cuda
