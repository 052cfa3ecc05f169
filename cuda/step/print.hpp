#pragma once
// A step's plan as a text. Private to cuda and the programs.
#include <string>
#include <string_view>

#include "cuda/step/choose.hpp"

namespace cf::cuda {

/// The nodes in order. A node's first line has its site, kernel, compulsory bytes and mode; below it stand the kernel's
/// plan and, with `reasons`, each kernel before it in the op's list and why it does not take the call.
std::string to_string(const StepPlan& plan, bool reasons = true);

/// The GPUs that there are measured numbers for: "h100", "h200" and "rtx5090", and their limits.
struct NamedArch {
  std::string_view name;
  const Arch& arch;
};
inline constexpr NamedArch kArchs[] = {{"h100", kH100}, {"h200", kH200}, {"rtx5090", kRtx5090}};

/// What a plan is asked for: a step of a model's graph.
struct StepQuery {
  ModelSpec model;
  DType activation = DType::f16;  // and of dense weights
  WeightFormat linears{};
  StepSizes sizes{};
  std::int64_t layer = 0;
  bool ends = false;  // the embedding, the final norm and the LM head, too
};

/// Plans one layer of a step as a graph of that GPU has it, which need not be there. cuBLASLt counts as there, with
/// scratch memory.
Result<StepPlan> plan_step(const Arch& arch, const StepQuery& query);

}  // namespace cf::cuda
