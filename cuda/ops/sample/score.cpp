#include "cuda/ops/sample/score.hpp"

#include <cmath>

#include "core/log_probs.hpp"
#include "core/sampling.hpp"

namespace cf::cuda {

RowScore row_score(const RowSum& sum, std::span<const std::int32_t> next, std::span<const float> next_logits,
                   std::span<const LogitOf> likely) {
  if (!std::isfinite(sum.most.logit)) return {.status = refused_logit(sum.most.id, double(sum.most.logit))};
  const double most = double(sum.most.logit);
  const double log_sum = std::log(std::ldexp(double(sum.weights), -sampling::kWeightBits));
  const auto log_prob = [&](float logit) { return double(logit) - most - log_sum; };
  RowScore score;
  for (std::size_t i = 0; i < next.size(); ++i)
    score.next.push_back({.log_prob = log_prob(next_logits[i]), .greedy = next[i] == sum.most.id});
  for (const LogitOf& l : likely) score.top.push_back({.id = l.id, .log_prob = log_prob(l.logit)});
  return score;
}

}  // namespace cf::cuda
