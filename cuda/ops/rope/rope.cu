#include "cuda/device/math.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/rope/rope.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// Block (t, i) takes heads i * Heads .. (i + 1) * Heads - 1 of token t; threadIdx.y selects q, k or v. A thread loads
/// its part of all these heads before it stores any. A position outside the table reads nothing outside the table and
/// makes the token's rotated elements NaN.
template <class T, int Heads>
__global__ void __launch_bounds__(3 * kMaxRopeThreads) rope_kernel(const __grid_constant__ ops::Rope::Args a) {
  let_successor_start();
  wait_for_predecessors();
  const int heads = int(a.qkv.shape[1]), head_dim = int(a.qkv.shape[3]), half = int(a.cos.shape[1]);
  const int part = int(threadIdx.y), first_head = int(blockIdx.y) * Heads;
  const long token = blockIdx.x, position = a.positions.data[token];
  const T* const from = static_cast<const T*>(a.qkv.data) + ((token * heads + first_head) * 3 + part) * head_dim;
  T* const to = static_cast<T*>(part == 0   ? a.q.data
                                : part == 1 ? a.k.data
                                            : a.v.data) +
                (token * heads + first_head) * head_dim;
  const auto for_each_head = [&](auto f) {
#pragma unroll
    for (int i = 0; i < Heads; ++i)
      if (Heads == 1 || first_head + i < heads) f(i, from + 3 * i * head_dim, to + i * head_dim);
  };

  const int singles = part < 2 ? rope_singles(2 * half) : 0, units = rope_units(head_dim, singles, kLane<T>);
#pragma unroll 1
  for (int unit = int(threadIdx.x); unit < units; unit += int(blockDim.x)) {
    if (unit >= singles) {
      const int column = singles + (unit - singles) * kLane<T>;
      uint4 vector[Heads];
      for_each_head([&](int i, const T* x, T*) { vector[i] = load_raw(x + column); });
      for_each_head([&](int i, const T*, T* y) { *reinterpret_cast<uint4*>(y + column) = vector[i]; });
      continue;
    }
    // An element behind the rotated ones goes through the same loads and keeps its bits.
    const bool first = unit < half;
    const int pair = first ? unit : min(unit - half, half - 1);
    T mine[Heads], other[Heads];
    for_each_head([&](int i, const T* x, T*) {
      mine[i] = x[unit];
      other[i] = x[first ? unit + half : pair];
    });
    const bool known = position >= 0 && position < a.cos.shape[0];
    const long at = (known ? position : 0) * half + pair;
    const float cos = known ? a.cos.data[at] : NAN, sin = a.sin.data[at];
    for_each_head([&](int i, const T*, T* y) {
      float p = to_float(first ? mine[i] : other[i]), q = to_float(first ? other[i] : mine[i]);
      rotate(p, q, cos, sin);
      y[unit] = unit < 2 * half ? from_float<T>(first ? p : q) : mine[i];
    });
  }
}

}  // namespace

Status prepare(const ops::Rope::Args& a, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  const auto d = ops::Rope::dims(a);
  CF_TRY(check_multiple_of_8(ops::Rope::name, "head_dim", d.head_dim));
  return with_activation(ops::Rope::name, a.qkv.dtype, [&](auto zero) {
    using T = decltype(zero);
    const RopePlan plan = rope_plan(launches.arch(), d.tokens, d.heads, d.head_dim, d.rotary_dim, kLane<T>);
    const LaunchShape shape{.grid = dim3(unsigned(d.tokens), unsigned((d.heads + plan.heads - 1) / plan.heads)),
                            .block = dim3(unsigned(plan.threads), 3)};
    return launch(ops::Rope::name, launches, shape, plan.heads == 1 ? rope_kernel<T, 1> : rope_kernel<T, 4>, a);
  });
}

}  // namespace cf::cuda
