#include "cuda/ops/norm/layernorm.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

template <class T>
struct Row : LayerNormRow<T> {
  static constexpr int inputs = kResidualLayerNormInputs;
  struct Input {
    uint4 x, a, b;
  };
  const T *a, *b;
  T *h, *y;
  __device__ Input load(long at) const { return {load_raw(this->x + at), load_raw(a + at), load_raw(b + at)}; }
  /// x is the sum rounded to T, as h stores it.
  __device__ void input(const Input& loaded, typename Row::Piece& v) const {
    typename Row::Piece p, q;
    unpack(loaded.x, v, T{});
    unpack(loaded.a, p, T{});
    unpack(loaded.b, q, T{});
#pragma unroll
    for (int e = 0; e < kLane<T>; ++e) v[e] = to_float(from_float<T>(v[e] + p[e] + q[e]));
  }
  __device__ void begin(long at, const typename Row::Piece& v) const { store_vec(h + at, v); }
  __device__ void finish(long at, typename Row::Side, const typename Row::Piece& v) const { store_vec(y + at, v); }
};

}  // namespace

Status prepare(const ops::ResidualLayerNorm::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_residual_layernorm(const ops::ResidualLayerNorm::Args& a, const LayerNormPlan& plan,
                                 LaunchList& launches) {
  return with_activation(ops::ResidualLayerNorm::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Row<T> row{
        {a.x.as<const T>().data}, a.a.as<const T>().data, a.b.as<const T>().data, a.h.as<T>().data, a.y.as<T>().data};
    return launch_norm(ops::ResidualLayerNorm::name, launches, plan, row, a.norm, a.x, a.eps);
  });
}

}  // namespace cf::cuda
