#pragma once
// A call's launches by the kernel that is chosen for it. Private to cuda.
#include "cuda/ops/kernel.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {

/// Whether cuBLASLt is there. The first call loads it.
bool has_gemm();

/// What a list of launches and its device offer a plan.
Target target_of(const LaunchList& launches);

/// Checks a call, chooses its kernel and adds the launches.
template <class Args>
Status prepare_chosen(const Args& args, LaunchList& launches) {
  CF_TRY(check_call(args, launches));
  CF_TRY_ASSIGN(const Choice choice, choose(target_of(launches), args));
  return choice.planned.prepare(launches);
}

}  // namespace cf::cuda
