#include "cuda/ops/linear/linear.hpp"

#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {

Status prepare(const ops::Linear::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

// Whether cuBLASLt has an algorithm is known when the call is prepared for a device. Where it has none, GEMV takes the
// call.
Status launch_cublaslt(const ops::Linear::Args& a, const GemmPlan& plan, LaunchList& launches) {
  CF_TRY_ASSIGN(const bool added, add_gemm(a, plan, launches));
  if (added) return {};
  CF_TRY_ASSIGN(const GemvLaunches few, plan_gemv(target_of(launches), a));
  return launch_gemv(a, few, launches);
}

Status launch_cublaslt_packed(const ops::Linear::Args& a, const GemmPlan& plan, LaunchList& launches) {
  CF_TRY_ASSIGN(const bool added, add_gemm(a, plan, launches));
  if (added) return {};
  CF_TRY_ASSIGN(const PackedLaunches few, plan_packed(target_of(launches), a));
  return launch_packed(a, few, launches);
}

}  // namespace cf::cuda
