#include "cuda/layernorm.cuh"

#include "cuda/check.hpp"

namespace cf::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(1024) layernorm_kernel(const __grid_constant__ ops::LayerNorm::Args a) {
  __shared__ LayerNormBlock::Smem smem;
  const long hidden = a.x.shape[1], row = long(blockIdx.x) * hidden;
  const T* x = static_cast<const T*>(a.x.data) + row;
  T* y = static_cast<T*>(a.y.data) + row;
  LayerNormBlock::run(
      int(hidden), float(a.eps), a.norm, [=](int i, float(&v)[kVec]) { load_vec(x + i, v); },
      [=](int i, const float(&v)[kVec]) { store_vec(y + i, v); }, smem);
}

}  // namespace

Status run(const ops::LayerNorm::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::LayerNorm::dims(a);
  constexpr std::int64_t most = LayerNormBlock::max_vectors * kVec * 1024;
  if (d.hidden % kVec || d.hidden > most)
    return Status::error(Code::unimplemented, "layernorm: cuda takes hidden a multiple of 8 up to " +
                                                  std::to_string(most) + ", got " + std::to_string(d.hidden));
  return with_activation(ops::LayerNorm::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    layernorm_kernel<T><<<unsigned(d.tokens), layernorm_plan(d.hidden).threads, 0, context.stream()>>>(a);
    return from_cuda(cudaGetLastError(), "layernorm");
  });
}

}  // namespace cf::cuda
