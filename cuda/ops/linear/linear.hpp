#pragma once
#include <string>
#include <vector>

#include "cuda/ops/kernel.hpp"
#include "cuda/ops/linear/packed/plan.hpp"

namespace cf::cuda {

/// The launches of linear's kernel for packed weights; none of a call that another kernel takes.
struct LinearLaunches {
  std::vector<GptqPlan> packed;
};
inline std::string to_string(const LinearLaunches& p) { return p.packed.empty() ? "" : to_string(p.packed.front()); }

Result<LinearLaunches> plan_linear(const Target&, const ops::Linear::Args&);
Status launch_linear(const ops::Linear::Args&, const LinearLaunches&, LaunchList&);

}  // namespace cf::cuda
