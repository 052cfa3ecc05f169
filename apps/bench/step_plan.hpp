#pragma once
// The kernels of a step on a GPU that need not be there, for --plan.
#include <string>
#include <string_view>
#include <vector>

#include "core/model/layer.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// The GPUs that --gpu names.
std::vector<std::string> plan_gpus();

/// What is planned: a layer's step as a CUDA graph has it.
struct PlanRequest {
  ModelSpec model;
  DType dtype = DType::f16;  // of activations and dense weights
  WeightFormat linears{};
  StepSizes sizes{};
  std::int64_t layer = 0;
  bool ends = false;  // the embedding, the final norm and the LM head, too
};

/// Every node with its site, kernel, bytes and plan, and why the kernels before it in the op's list do not take it.
Result<std::string> step_plan_text(std::string_view gpu, const PlanRequest& request);

}  // namespace cf::apps
