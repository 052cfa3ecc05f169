#include "cuda/port/run.hpp"

namespace cf::cuda {

#define CF_OP(Op)                                                           \
  Status run(const ops::Op::Args& args, Context& context) {                 \
    LaunchList launches(context);                                           \
    CF_TRY(prepare(args, launches));                                        \
    return launches.submit(context.stream(), {.early = context.overlap()}); \
  }
#include "core/ops/port.def"
#undef CF_OP

}  // namespace cf::cuda
