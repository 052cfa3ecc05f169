#include "cuda/ops/norm/qk_norm.hpp"

#include "cuda/device/norm.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

constexpr int kMaxThreads = 128;

/// Which part a head of the product belongs to: 0, 1 or 2 for q, k or v.
struct HeadParts {
  int rows;      // heads of a token: q's, k's and v's
  int heads;     // of q
  int kv_heads;  // of k, and of v
  bool separate;

  __device__ int part(int row) const {
    if (!separate) return row % 3;
    return row < heads ? 0 : row < heads + kv_heads ? 1 : 2;
  }
};

/// A warp takes one head of one token and holds it in registers.
template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    qk_norm_kernel(const __grid_constant__ ops::QkNorm::Args a, const __grid_constant__ HeadParts parts, long warps,
                   float eps, float inverse_size) {
  constexpr int n = kLane<T>, pieces = int(kMaxNormedHeadDim) / (32 * n);
  const int size = int(a.qkv.shape[3]), lane = threadIdx.x % 32;
  const long warp = long(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const auto for_each_piece = [&](auto f) {
#pragma unroll
    for (int p = 0; p < pieces; ++p)
      if (const int i = (p * 32 + lane) * n; i < size) f(p, i);
  };
  let_successor_start();
  if (warp >= warps) return;
  const int part = parts.part(int(warp % parts.rows));
  const ConstAnyView<1>& gamma = part == 0 ? a.q_gamma : a.k_gamma;
  StoredWeight<n> gain[pieces];
  with_weight(gamma.dtype, [&](auto type) {
    for_each_piece([&](int p, int i) { gain[p].load(static_cast<const decltype(type)*>(gamma.data) + i); });
  });

  wait_for_predecessors();
  const T* const from = static_cast<const T*>(a.qkv.data) + warp * size;
  T* const to = static_cast<T*>(a.y.data) + warp * size;
  uint4 loaded[pieces];
  for_each_piece([&](int p, int i) { loaded[p] = load_raw(from + i); });
  if (part == 2) {
    for_each_piece([&](int p, int i) { *reinterpret_cast<uint4*>(to + i) = loaded[p]; });
    return;
  }
  float x[pieces][n];
  for_each_piece([&](int p, int) { unpack(loaded[p], x[p], T{}); });
  const float squares = RmsNormOfRow::of_warp([&](auto f) { for_each_piece([&](int p, int) { f(p); }); }, x);
  const RmsNormOfRow::Scaled scaled{rsqrtf(product(squares, inverse_size) + eps)};
  with_weight(gamma.dtype, [&](auto type) {
    for_each_piece([&](int p, int i) {
      float g[n], y[n];
      gain[p].unpack(g, type);
#pragma unroll
      for (int e = 0; e < n; ++e) y[e] = scaled(x[p][e], g[e]);
      store_vec(to + i, y);
    });
  });
}

}  // namespace

Status prepare(const ops::QkNorm::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_qk_norm(const ops::QkNorm::Args& a, const QkNormPlan& plan, LaunchList& launches) {
  const auto d = ops::QkNorm::dims(a);
  const HeadParts parts{.rows = int(d.heads + 2 * d.kv_heads),
                        .heads = int(d.heads),
                        .kv_heads = int(d.kv_heads),
                        .separate = d.layout == ops::QkvLayout::separate};
  return with_activation(ops::QkNorm::name, a.qkv.dtype, [&](auto zero) {
    return launch(ops::QkNorm::name, launches, {.grid = unsigned(plan.blocks()), .block = unsigned(plan.threads)},
                  qk_norm_kernel<decltype(zero)>, a, parts, long(plan.heads), float(a.eps), 1 / float(d.head_dim));
  });
}

}  // namespace cf::cuda
