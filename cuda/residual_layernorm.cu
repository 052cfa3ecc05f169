#include "cuda/launch.hpp"
#include "cuda/layernorm.cuh"

namespace cf::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(1024)
    residual_layernorm_kernel(const __grid_constant__ ops::ResidualLayerNorm::Args a) {
  __shared__ LayerNormBlock::Smem smem;
  let_successor_start();
  wait_for_predecessors();
  const long hidden = a.x.shape[1], row = long(blockIdx.x) * hidden;
  const T* parts[] = {static_cast<const T*>(a.x.data) + row, static_cast<const T*>(a.a.data) + row,
                      static_cast<const T*>(a.b.data) + row};
  T *h = static_cast<T*>(a.h.data) + row, *y = static_cast<T*>(a.y.data) + row;
  LayerNormBlock::run(
      int(hidden), float(a.eps), a.norm,
      [&](int i, float(&v)[kVec]) {
        float p[3][kVec];
#pragma unroll
        for (int k = 0; k < 3; ++k) load_vec(parts[k] + i, p[k]);
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[e] = to_float(from_float<T>(p[0][e] + p[1][e] + p[2][e]));  // h as stored
        store_vec(h + i, v);
      },
      [=](int i, float(&v)[kVec]) { store_vec(y + i, v); }, smem);
}

}  // namespace

Status run(const ops::ResidualLayerNorm::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::ResidualLayerNorm::dims(a);
  CF_TRY(check_layernorm_hidden(ops::ResidualLayerNorm::name, d.hidden));
  return with_activation(ops::ResidualLayerNorm::name, a.x.dtype, [&](auto zero) {
    return launch(ops::ResidualLayerNorm::name, context,
                  {.grid = unsigned(d.tokens), .block = unsigned(layernorm_plan(d.hidden).threads)},
                  residual_layernorm_kernel<decltype(zero)>, a);
  });
}

}  // namespace cf::cuda
