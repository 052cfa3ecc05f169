#include "cuda/ops/norm/layernorm.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

template <class T>
struct Row : LayerNormRow<T> {
  using Norm = RmsNormOfRow;
  T* y;
  __device__ void finish(long at, typename Row::Side, const typename Row::Piece& v) const { store_vec(y + at, v); }
};

}  // namespace

Status prepare(const ops::RmsNorm::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_rmsnorm(const ops::RmsNorm::Args& a, const LayerNormPlan& plan, LaunchList& launches) {
  return with_activation(ops::RmsNorm::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Row<T> row{{a.x.as<const T>().data}, a.y.as<T>().data};
    return launch_norm(ops::RmsNorm::name, launches, plan, row, {.gamma = a.gamma, .beta = {}}, a.x, a.eps);
  });
}

}  // namespace cf::cuda
