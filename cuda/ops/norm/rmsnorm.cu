#include <cuda_runtime_api.h>

#include "cuda/device/math.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/norm/layernorm.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A block holds one row in registers, as layernorm_plan() divides it, and reads it once.
template <class T, int Elements>
__global__ void __launch_bounds__(max_layernorm_threads(Elements), min_layernorm_blocks(Elements))
    rmsnorm_kernel(const __grid_constant__ ops::RmsNorm::Args a, int hidden, float eps, float inverse_hidden) {
  constexpr int lane_elements = kLane<T>, pieces = Elements / lane_elements;
  constexpr int max_warps = max_layernorm_threads(Elements) / 32;
  __shared__ float warp_sums[max_warps];
  float x[pieces][lane_elements];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const long begin = long(blockIdx.x) * hidden;
  const auto for_each_piece = [&](auto f) {
#pragma unroll
    for (int p = 0; p < pieces; ++p)
      if (const int i = (p * int(blockDim.x) + int(threadIdx.x)) * lane_elements; i < hidden) f(p, i);
  };

  let_successor_start();
  wait_for_predecessors();
  for_each_piece([&](int p, int i) { unpack(load_raw(static_cast<const T*>(a.x.data) + begin + i), x[p], T{}); });
  float sum = 0;
  for_each_piece([&](int p, int) {
#pragma unroll
    for (int e = 0; e < lane_elements; ++e) sum = fmaf(x[p][e], x[p][e], sum);
  });
  sum = warp_sum(sum);
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  // Every warp sums up the warps' sums in the same order.
  const float squares = warp_sum(lane < warps ? warp_sums[lane] : 0.f);
  const float scale = rsqrtf(squares * inverse_hidden + eps);
  with_weight(a.gamma.dtype, [&](auto type) {
    for_each_piece([&](int p, int i) {
      StoredWeight<lane_elements> gamma;
      gamma.load(static_cast<const decltype(type)*>(a.gamma.data) + i);
      float g[lane_elements];
      gamma.unpack(g, type);
#pragma unroll
      for (int e = 0; e < lane_elements; ++e) x[p][e] *= scale * g[e];
      store_vec(static_cast<T*>(a.y.data) + begin + i, x[p]);
    });
  });
}

}  // namespace

Status prepare(const ops::RmsNorm::Args& a, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  constexpr std::string_view name = ops::RmsNorm::name;
  const auto d = ops::RmsNorm::dims(a);
  if (d.hidden % 8 || d.hidden > kMaxLayerNormHidden)
    return Status::error(Code::unimplemented, std::string(name) + ": cuda takes hidden a multiple of 8 up to " +
                                                  std::to_string(kMaxLayerNormHidden) + ", got " +
                                                  std::to_string(d.hidden));
  return with_activation(name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LayerNormPlan plan = layernorm_plan(launches.arch(), d.tokens, d.hidden, 1);
    const auto kernel = plan.elements == 8    ? rmsnorm_kernel<T, 8>
                        : plan.elements == 16 ? rmsnorm_kernel<T, 16>
                                              : rmsnorm_kernel<T, 64>;
    return launch(name, launches, {.grid = unsigned(d.tokens), .block = unsigned(plan.threads)}, kernel, a,
                  int(d.hidden), float(a.eps), 1 / float(d.hidden));
  });
}

}  // namespace cf::cuda
