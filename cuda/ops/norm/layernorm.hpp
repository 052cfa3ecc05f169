#pragma once
#include <cstdint>
#include <string>

#include "cuda/ops/kernel.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// How the kernels of norms hold a row: in the registers of one block, `elements` of them in each thread. The kernels
/// compute the same with any plan, to rounding.
struct LayerNormPlan {
  int elements;  // 8, 16 or 64, a template argument of the kernels
  int threads;   // of a block, whole warps
};

inline std::string to_string(const LayerNormPlan& p) {
  return plan_text({{p.threads, "threads a row"}, {p.elements, "elements a thread"}});
}

inline constexpr std::int64_t kMaxLayerNormHidden = 32768;
/// The tensors that the normalised row of residual_layernorm is the sum of.
inline constexpr int kResidualLayerNormInputs = 3;

/// The most threads of a block, and the number of such blocks that an SM must have registers for; with 0 the compiler
/// decides. A thread then has at most 64 registers, or 128 with 64 elements.
constexpr int max_layernorm_threads(int elements) { return elements == 8 ? 1024 : 512; }
constexpr int min_layernorm_blocks(int elements) { return elements == 16 ? 2 : 0; }

/// Rows whose threads are all resident at once get 8 elements a thread: the shortest time from a row's first load to
/// its last store. More rows get 16, with fewer instructions an element, unless x is the sum of several tensors
/// (`inputs` > 1), whose loads limit the speed anyway. Rows too long for a block of either get 64. All steps of a class
/// have one plan.
constexpr LayerNormPlan layernorm_plan(const Arch& arch, std::int64_t tokens, std::int64_t hidden, int inputs) {
  constexpr auto threads = [](std::int64_t n, int elements) {
    return int((n + elements - 1) / elements + 31) / 32 * 32;
  };
  const std::int64_t rows = arch.tuning->class_of(tokens).planned_as;
  const bool at_once = rows * threads(hidden, 8) <= std::int64_t(arch.sm_count) * arch.threads_per_sm;
  int elements = at_once || inputs > 1 ? 8 : 16;
  if (threads(hidden, elements) > max_layernorm_threads(elements)) elements = 64;
  return {.elements = elements, .threads = threads(hidden, elements)};
}

/// The plans of the norms' kernels. They refuse a hidden that is no multiple of 8 or above kMaxLayerNormHidden.
Result<LayerNormPlan> plan_layernorm(const Target&, const ops::LayerNorm::Args&);
Result<LayerNormPlan> plan_rmsnorm(const Target&, const ops::RmsNorm::Args&);
Result<LayerNormPlan> plan_layernorm_residual(const Target&, const ops::LayerNormResidual::Args&);
Result<LayerNormPlan> plan_residual_layernorm(const Target&, const ops::ResidualLayerNorm::Args&);

Status launch_layernorm(const ops::LayerNorm::Args&, const LayerNormPlan&, LaunchList&);
Status launch_rmsnorm(const ops::RmsNorm::Args&, const LayerNormPlan&, LaunchList&);
Status launch_layernorm_residual(const ops::LayerNormResidual::Args&, const LayerNormPlan&, LaunchList&);
Status launch_residual_layernorm(const ops::ResidualLayerNorm::Args&, const LayerNormPlan&, LaunchList&);

}  // namespace cf::cuda
