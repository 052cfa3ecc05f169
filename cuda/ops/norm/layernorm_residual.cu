#include "cuda/ops/norm/layernorm.cuh"
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

Status prepare(const ops::LayerNormResidual::Args& a, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  return with_activation(ops::LayerNormResidual::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Row<T> row{{a.x.as<const T>().data}, a.residual.as<const T>().data, a.y.as<T>().data};
    return prepare_layernorm(ops::LayerNormResidual::name, launches, row, a.norm, a.x, a.eps);
  });
}

}  // namespace cf::cuda
