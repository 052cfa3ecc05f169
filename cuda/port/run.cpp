#include "cuda/port/run.hpp"

#include "cuda/ops/run_prepared.hpp"

namespace cf::cuda {

#define CF_OP(Op) \
  Status run(const ops::Op::Args& args, Context& context) { return run_prepared(args, context); }
#include "core/ops/port.def"
#undef CF_OP

}  // namespace cf::cuda
