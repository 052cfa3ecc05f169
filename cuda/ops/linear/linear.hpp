#pragma once
// linear's kernels, of kernels.def: the plan of a call, or why the kernel does not take it; and the plan's launches.
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/linear/cublaslt/cublaslt.hpp"
#include "cuda/ops/linear/fp8/fp8.hpp"
#include "cuda/ops/linear/gemv/gemv.hpp"
#include "cuda/ops/linear/packed/packed.hpp"
#include "cuda/ops/linear/tiles/tiles.hpp"
#include "cuda/ops/linear/wgmma/wgmma.hpp"

namespace cf::cuda {

#define CF_KERNEL(Op, kernel, Plan)                                \
  Result<Plan> plan_##kernel(const Target&, const ops::Op::Args&); \
  Status launch_##kernel(const ops::Op::Args&, const Plan&, LaunchList&);
#include "cuda/ops/linear/kernels.def"
#undef CF_KERNEL

}  // namespace cf::cuda
