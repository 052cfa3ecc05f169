#include "cuda/launch.hpp"
#include "cuda/layernorm.cuh"

namespace cf::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(1024)
    layernorm_residual_kernel(const __grid_constant__ ops::LayerNormResidual::Args a) {
  __shared__ LayerNormBlock::Smem smem;
  let_successor_start();
  wait_for_predecessors();
  const long hidden = a.x.shape[1], row = long(blockIdx.x) * hidden;
  const T *x = static_cast<const T*>(a.x.data) + row, *residual = static_cast<const T*>(a.residual.data) + row;
  T* y = static_cast<T*>(a.y.data) + row;
  LayerNormBlock::run(
      int(hidden), float(a.eps), a.norm, [=](int i, float(&v)[kVec]) { load_vec(x + i, v); },
      [=](int i, float(&v)[kVec]) {
        float r[kVec];
        load_vec(residual + i, r);
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[e] += r[e];
        store_vec(y + i, v);
      },
      smem);
}

}  // namespace

Status run(const ops::LayerNormResidual::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::LayerNormResidual::dims(a);
  CF_TRY(check_layernorm_hidden(ops::LayerNormResidual::name, d.hidden));
  return with_activation(ops::LayerNormResidual::name, a.x.dtype, [&](auto zero) {
    return launch(ops::LayerNormResidual::name, context,
                  {.grid = unsigned(d.tokens), .block = unsigned(layernorm_plan(d.hidden).threads)},
                  layernorm_residual_kernel<decltype(zero)>, a);
  });
}

}  // namespace cf::cuda
