#include "cuda/ops/run.hpp"

#include "cuda/ops/prepare.hpp"
#include "cuda/runtime/wgmma.hpp"

namespace cf::cuda {

Target target_of(const LaunchList& launches) {
  return {.arch = launches.arch(),
          .scratch = launches.scratch(),
          .has_wgmma = runs_wgmma(launches.device()),
          .has_gemm = has_gemm};
}

#define CF_OP(Op)                                                           \
  Status run(const ops::Op::Args& args, Context& context) {                 \
    LaunchList launches(context);                                           \
    CF_TRY(prepare(args, launches));                                        \
    return launches.submit(context.stream(), {.early = context.overlap()}); \
  }
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/ranks.def"
#undef CF_OP

}  // namespace cf::cuda
