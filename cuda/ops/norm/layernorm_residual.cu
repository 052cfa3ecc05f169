#include "cuda/ops/norm/layernorm.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

template <class T>
struct Row : LayerNormRow<T> {
  using Side = uint4;
  const T* residual;
  T* y;
  __device__ Side side(long at) const { return load_raw(residual + at); }
  __device__ void finish(long at, const Side& side, typename Row::Piece& v) const {
    typename Row::Piece r;
    unpack(side, r, T{});
#pragma unroll
    for (int e = 0; e < kLane<T>; ++e) v[e] += r[e];
    store_vec(y + at, v);
  }
};

}  // namespace

Status prepare(const ops::LayerNormResidual::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_layernorm_residual(const ops::LayerNormResidual::Args& a, const LayerNormPlan& plan,
                                 LaunchList& launches) {
  return with_activation(ops::LayerNormResidual::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Row<T> row{{a.x.as<const T>().data}, a.residual.as<const T>().data, a.y.as<T>().data};
    return launch_norm(ops::LayerNormResidual::name, launches, plan, row, a.norm, a.x, a.eps);
  });
}

}  // namespace cf::cuda
