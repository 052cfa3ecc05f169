#include "apps/bench/step_plan.hpp"

#include <algorithm>
#include <iterator>

#include "cuda/step/print.hpp"

namespace cf::apps {

std::vector<std::string> plan_gpus() {
  std::vector<std::string> names;
  for (const cuda::NamedArch& gpu : cuda::kArchs) names.emplace_back(gpu.name);
  return names;
}

Result<std::string> step_plan_text(std::string_view gpu, const PlanRequest& r) {
  const auto* const named = std::ranges::find(cuda::kArchs, gpu, &cuda::NamedArch::name);
  if (named == std::end(cuda::kArchs))
    return Status::error(Code::not_found, "--gpu: expected one that plans are known for, got " + std::string(gpu));
  CF_TRY_ASSIGN(const cuda::StepPlan plan, cuda::plan_step(named->arch, {.model = r.model,
                                                                         .activation = r.dtype,
                                                                         .linears = r.linears,
                                                                         .sizes = r.sizes,
                                                                         .layer = r.layer,
                                                                         .ends = r.ends}));
  return cuda::to_string(plan);
}

}  // namespace cf::apps
