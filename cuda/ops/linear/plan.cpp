#include "cuda/ops/linear/linear.hpp"

namespace cf::cuda {

Result<LinearLaunches> plan_linear(const Target& target, const ops::Linear::Args& a) {
  LinearLaunches made;
  if (const auto* packed = std::get_if<PackedWeight>(&a.linear.weight)) {
    const Result<GptqLayout> layout = gptq_layout(ops::Linear::name, *packed);
    if (!layout) return layout.status();
    const std::int64_t tokens = a.x.shape[0];
    CF_TRY(
        for_each_gptq_launch(target.arch, gptq_sizes(*layout, tokens), tokens, [&](std::int64_t, const GptqPlan& plan) {
          made.packed.push_back(plan);
          return Status();
        }));
  }
  return made;
}

}  // namespace cf::cuda
