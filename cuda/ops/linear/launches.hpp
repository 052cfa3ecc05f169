#pragma once
// How many launches a product of a step takes. Each reads the whole weight. Private to cuda.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/ops/linear/linear.hpp"
#include "cuda/ops/linear/linear_gptq.hpp"

namespace cf::cuda {

/// Calls f(first, count) for every launch of linear's own kernels with a dense weight, which takes tokens [first,
/// first + count), and stops at the first Status that is not ok.
template <class F>
Status for_each_linear_launch(std::int64_t tokens, F&& f) {
  for (std::int64_t first = 0; first < tokens; first += kMmaTokens)
    CF_TRY(f(first, std::min<std::int64_t>(kMmaTokens, tokens - first)));
  return {};
}

/// The same with a packed GPTQ weight: f(first, plan), for plan.tokens tokens. Refuses a weight of too many columns.
template <class F>
Status for_each_gptq_launch(const Arch& arch, const GptqSizes& sizes, std::int64_t tokens, F&& f) {
  for (std::int64_t first = 0; first < tokens;) {
    const GptqPlan plan = gptq_plan(arch, sizes, tokens - first, kLinearGptqTurns, kLinearGptqBlocksPerSm);
    if (plan.grid == 0)
      return Status::error(Code::unimplemented, "linear: cuda takes GPTQ weights of up to " +
                                                    std::to_string(kGptqMaxColumns) + " columns, got " +
                                                    std::to_string(kGptqColumns * sizes.chunks));
    CF_TRY(f(first, plan));
    first += plan.tokens;
  }
  return {};
}

}  // namespace cf::cuda
