#include "cuda/ops/norm/layernorm.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

template <class T>
struct Row : LayerNormRow<T> {
  T* y;
  __device__ void finish(long at, typename Row::Side, const typename Row::Piece& v) const { store_vec(y + at, v); }
};

}  // namespace

Status prepare(const ops::LayerNorm::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_layernorm(const ops::LayerNorm::Args& a, const LayerNormPlan& plan, LaunchList& launches) {
  return with_activation(ops::LayerNorm::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Row<T> row{{a.x.as<const T>().data}, a.y.as<T>().data};
    return launch_norm(ops::LayerNorm::name, launches, plan, row, a.norm, a.x, a.eps);
  });
}

}  // namespace cf::cuda
