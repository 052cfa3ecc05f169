#include "cuda/ops/norm/layernorm.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

template <class T>
struct Row : LayerNormRow<T> {
  static constexpr int norms = 2;
  T *y1, *y2;
  __device__ void finish(long at, typename Row::Side, const typename Row::Piece (&v)[2]) const {
    store_vec(y1 + at, v[0]);
    store_vec(y2 + at, v[1]);
  }
};

}  // namespace

Status prepare(const ops::DualLayerNorm::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_dual_layernorm(const ops::DualLayerNorm::Args& a, const LayerNormPlan& plan, LaunchList& launches) {
  return with_activation(ops::DualLayerNorm::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Row<T> row{{a.x.as<const T>().data}, a.y1.as<T>().data, a.y2.as<T>().data};
    return launch_norm(ops::DualLayerNorm::name, launches, plan, row, {a.norm1, a.norm2}, a.x, a.eps);
  });
}

}  // namespace cf::cuda
