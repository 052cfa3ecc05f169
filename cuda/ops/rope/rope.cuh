#pragma once
// RoPE's rotation, for the kernels of rope and rope_append: they differ in where a rotated head goes.
#include <type_traits>

#include "cuda/device/math.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/rope/rope.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {

/// Where a part of consecutive heads goes: head i to first + i * stride, and nowhere where first is null.
template <class T>
struct HeadRows {
  T* first;
  long stride;
};

/// What the kernels read of a call, whose Args have much that they do not need.
struct RopeInput {
  const void* qkv;
  const float *cos, *sin;
  const std::int32_t* positions;
  int heads, kv_heads, head_dim;  // heads of q
  int table_rows, half;           // half of the rotated elements
};

template <class Args>
RopeInput rope_input(const Args& a) {
  const auto d = Args::Op::dims(a);
  return {.qkv = a.qkv.data,
          .cos = a.cos.data,
          .sin = a.sin.data,
          .positions = a.positions.data,
          .heads = int(d.heads),
          .kv_heads = int(d.kv_heads),
          .head_dim = int(d.head_dim),
          .table_rows = int(d.table_rows),
          .half = int(d.rotary_dim / 2)};
}

/// The rows of consecutive heads of a token's q, k or v, (tokens, heads, head_dim).
template <class T>
__device__ HeadRows<T> token_rows(void* to, long token, int head, int heads, int head_dim) {
  return {static_cast<T*>(to) + (token * heads + head) * head_dim, head_dim};
}

/// Rotates the 16 bytes at `column` of each head, which are in `vectors`. `x(i)` is the whole of head i's q or k, which
/// has the other element of each pair. An element behind the rotated ones goes the same way and keeps its bits. A
/// position outside the table reads nothing outside the table and makes the rotated elements NaN.
template <class T, class ForEachHead, class Head>
__device__ void turn(const RopeInput& a, long token, int column, uint4* vectors, ForEachHead for_each_head, Head x) {
  constexpr int n = kLane<T>;
  const int half = a.half;
  const long position = a.positions[token];
  const bool known = position >= 0 && position < a.table_rows;
  const long row = (known ? position : 0) * half;
  const auto is_first = [&](int e) { return column + e < half; };
  float cos[n], sin[n];
#pragma unroll
  for (int e = 0; e < n; ++e) {
    const long at = row + (is_first(e) ? column + e : min(column + e - half, half - 1));
    cos[e] = known ? a.cos[at] : NAN;
    sin[e] = a.sin[at];
  }
  for_each_head([&](int h) {
    alignas(16) T mine[n], other[n];
    *reinterpret_cast<uint4*>(mine) = vectors[h];
#pragma unroll
    for (int e = 0; e < n; ++e) other[e] = x(h)[column + e + (is_first(e) ? half : -half)];
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const bool first = is_first(e);
      float p = to_float(first ? mine[e] : other[e]), q = to_float(first ? other[e] : mine[e]);
      rotate(p, q, cos[e], sin[e]);
      if (column + e < 2 * half) mine[e] = from_float<T>(first ? p : q);
    }
    vectors[h] = *reinterpret_cast<const uint4*>(mine);
  });
}

/// One unit of a token, which all threads of a block have in common. A thread loads its part of all heads before it stores any. `rows` has
///   begin(token)                 loads what says where the token goes
///   locate(token)                loads what follows from that, while the heads are on their way
///   of(token, part, first_head)  the HeadRows of a part from a head on
template <class T, int Heads, ops::QkvLayout Layout, class Rows>
__device__ void rope_unit(const RopeInput& a, const RopePlan& plan, long token, Rows rows) {
  constexpr bool separate = Layout == ops::QkvLayout::separate;
  const int index = int(blockIdx.y * blockDim.x + threadIdx.x);
  const RopeUnit unit = plan.unit<Layout>(index);
  const int head_dim = a.head_dim, first_head = unit.group * Heads, column = unit.vector * kLane<T>;
  int heads = a.heads;  // of the unit's part
  const T* from = static_cast<const T*>(a.qkv);
  if constexpr (separate) {
    const int head = unit.part == 0 ? first_head : heads + (unit.part - 1) * a.kv_heads + first_head;
    from += (token * (heads + 2 * a.kv_heads) + head) * head_dim;
    if (unit.part > 0) heads = a.kv_heads;
  } else {
    from += ((token * heads + first_head) * 3 + unit.part) * head_dim;
  }
  const auto x = [&](int i) { return from + (separate ? 1 : 3) * i * head_dim; };
  const auto for_each_head = [&](auto f) {
#pragma unroll
    for (int i = 0; i < Heads; ++i)
      if (Heads == 1 || first_head + i < heads) f(i);
  };
  wait_for_predecessors();
  let_successor_start();  // not earlier, so that attention finds the older keys: LaunchMode::after_waiting
  if (index >= plan.units()) return;

  rows.begin(token);
  uint4 vectors[Heads];
  for_each_head([&](int i) { vectors[i] = load_raw(x(i) + column); });
  rows.locate(token);
  if (unit.turns) turn<T>(a, token, column, vectors, for_each_head, x);
  const HeadRows<T> to = rows.of(token, unit.part, first_head);
  if (!to.first) return;
  for_each_head([&](int i) { *reinterpret_cast<uint4*>(to.first + i * to.stride + column) = vectors[i]; });
}

/// Adds a plan's launch for some of a call's tokens. launch_kernel(zero, layout, shape) adds the kernel for activations
/// of zero's type and the layout that `layout` has as its value.
template <class Args, class LaunchKernel>
Status launch_rope_of(const Args& a, const RopePlan& plan, std::int64_t tokens, LaunchKernel launch_kernel) {
  return with_activation(Args::Op::name, a.qkv.dtype, [&](auto zero) {
    using ops::QkvLayout;
    const LaunchShape shape{.grid = dim3(unsigned(tokens), unsigned(plan.blocks.blocks)),
                            .block = unsigned(plan.blocks.threads)};
    if (a.layout == QkvLayout::separate)
      return launch_kernel(zero, std::integral_constant<QkvLayout, QkvLayout::separate>(), shape);
    return launch_kernel(zero, std::integral_constant<QkvLayout, QkvLayout::interleaved_by_head>(), shape);
  });
}

}  // namespace cf::cuda
