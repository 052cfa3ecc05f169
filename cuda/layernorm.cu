#include "cuda/layernorm.cuh"

#include "cuda/launch.hpp"

namespace cf::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(1024) layernorm_kernel(const __grid_constant__ ops::LayerNorm::Args a) {
  __shared__ LayerNormBlock::Smem smem;
  let_successor_start();
  wait_for_predecessors();
  const long hidden = a.x.shape[1], row = long(blockIdx.x) * hidden;
  const T* x = static_cast<const T*>(a.x.data) + row;
  T* y = static_cast<T*>(a.y.data) + row;
  LayerNormBlock::run(
      int(hidden), float(a.eps), a.norm, [=](int i, float(&v)[kVec]) { load_vec(x + i, v); },
      [=](int i, float(&v)[kVec]) { store_vec(y + i, v); }, smem);
}

}  // namespace

Status run(const ops::LayerNorm::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::LayerNorm::dims(a);
  CF_TRY(check_layernorm_hidden(ops::LayerNorm::name, d.hidden));
  return with_activation(ops::LayerNorm::name, a.x.dtype, [&](auto zero) {
    return launch(ops::LayerNorm::name, context,
                  {.grid = unsigned(d.tokens), .block = unsigned(layernorm_plan(d.hidden).threads)},
                  layernorm_kernel<decltype(zero)>, a);
  });
}

}  // namespace cf::cuda
