// For programs without CUDA, which choose kernels and print plans: kernels.def's launches, none of which runs.
#include "cuda/ops/kernels.hpp"

namespace cf::cuda {

#define CF_KERNEL(Op, kernel, Plan)                                                          \
  Status launch_##kernel(const ops::Op::Args&, const Plan&, LaunchList&) {                   \
    return Status::error(Code::unimplemented, #kernel ": this program has no CUDA kernels"); \
  }
#include "cuda/ops/kernels.def"
#undef CF_KERNEL

}  // namespace cf::cuda
