#include "cuda/ops/ranks/all_reduce.hpp"

namespace cf::cuda {

Result<ExchangePlan> plan_all_reduce_parts(const Target&, const ops::AllReduce::Args& a) {
  CF_TRY(check_activation(ops::AllReduce::name, a.y.dtype));
  if (a.x.shape[0] != a.ranks) return not_taken("the parts of all ranks", "this rank's");
  return plan_items(a.y.size(), 256, 0);
}

Result<ExchangePlan> plan_all_reduce_words(const Target&, const ops::AllReduce::Args& a) {
  CF_TRY(check_activation(ops::AllReduce::name, a.y.dtype));
  CF_TRY_ASSIGN(const std::int64_t lanes, lanes_of(a, a.y.bytes()));
  return plan_words(a, lanes);
}

Result<ExchangePlan> plan_all_reduce_slices(const Target& target, const ops::AllReduce::Args& a) {
  CF_TRY(check_activation(ops::AllReduce::name, a.y.dtype));
  CF_TRY_ASSIGN(const std::int64_t lanes, lanes_of(a, a.y.bytes()));
  return plan_slices(target, lanes);
}

}  // namespace cf::cuda
