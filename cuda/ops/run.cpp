#include "cuda/ops/run.hpp"

#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run_prepared.hpp"
#include "cuda/runtime/wgmma.hpp"

namespace cf::cuda {

Target target_of(const LaunchList& launches) {
  return {.arch = launches.arch(),
          .scratch = launches.scratch(),
          .has_wgmma = runs_wgmma(launches.device()),
          .has_gemm = has_gemm};
}

#define CF_OP(Op) \
  Status run(const ops::Op::Args& args, Context& context) { return run_prepared(args, context); }
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/ranks.def"
#undef CF_OP

}  // namespace cf::cuda
