// The list of each op's kernels, out of kernels.def.
#include <type_traits>
#include <vector>

#include "cuda/ops/kernel.hpp"
#include "cuda/ops/kernels.hpp"

namespace cf::cuda {
namespace {

template <class Args>
std::vector<Kernel<Args>> kernels() {
  std::vector<Kernel<Args>> list;
#define CF_KERNEL(Op, kernel, Plan)                  \
  if constexpr (std::is_same_v<Args, ops::Op::Args>) \
    list.push_back(make_kernel<Args, plan_##kernel, launch_##kernel>(#kernel));
#include "cuda/ops/kernels.def"
#undef CF_KERNEL
  return list;
}

}  // namespace

#define CF_OP(Op)                                                                    \
  std::span<const Kernel<ops::Op::Args>> kernels_of(const ops::Op::Args&) {          \
    static const std::vector<Kernel<ops::Op::Args>> list = kernels<ops::Op::Args>(); \
    return list;                                                                     \
  }
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/ranks.def"
#undef CF_OP

}  // namespace cf::cuda
