#include "cuda/ops/linear/packed/sum.hpp"

#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {

Result<GptqSumPlan> plan_linear_sum(const Target& target, const ops::LinearSum::Args& a) {
  constexpr std::string_view name = ops::LinearSum::name;
  const auto* const first = std::get_if<PackedWeight>(&a.linear.weight);
  const auto* const second = std::get_if<PackedWeight>(&a.linear2.weight);
  if (!first || !second) return not_taken("two packed GPTQ weights", "another weight");
  CF_TRY(check_gptq_activation(name, a.x.dtype));
  if (target.arch.tuning->is_invariant()) return not_taken("classes of step sizes", "one class");
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(name, *first));
  CF_TRY_ASSIGN(const GptqLayout layout2, gptq_layout(name, *second));
  Status status;
  bool plain = true;
  status = ops::LinearSum::for_each_part(a, [&, is_first = true](const ops::Linear::Args& part) mutable -> Status {
    plain = plain && gptq_is_plain(part, is_first ? layout : layout2, {}, kLinearSumRows);
    is_first = false;
    return {};
  });
  CF_TRY(status);
  if (!plain) return not_taken("rows in their own order and of an even number, and biases of y's dtype", "others");
  const std::int64_t tokens = a.x.shape[0];
  const GptqSumPlan plan = gptq_sum_plan(target.arch, gptq_sizes(layout, tokens), gptq_sizes(layout2, tokens), tokens);
  if (plan.second.grid == 0)
    return not_taken("products whose columns fit one cluster", std::to_string(a.x.shape[1]) + " and " +
                                                                   std::to_string(a.x2.shape[1]) + " columns of " +
                                                                   std::to_string(tokens) + " tokens");
  return plan;
}

}  // namespace cf::cuda
