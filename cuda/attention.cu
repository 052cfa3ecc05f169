#include "cuda/attention.hpp"

#include <algorithm>

#include "cuda/device/async.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/launch.hpp"

namespace cf::cuda {
namespace {

constexpr int kThreads = 256, kKeysAtOnce = 4, kMaxHeadDim = 256;

/// One query's attention over one split of its keys: a block. The splits of a query are a cluster, whose blocks gather
/// each other's maximum, sum and values and merge them in the order of the splits. Within a block a group of Lanes lanes
/// holds a key, eight elements each, and the groups take turns at the keys; they are merged in order, too.
template <class T, int Lanes>
__global__ void __launch_bounds__(kThreads) attention_kernel(const __grid_constant__ ops::Attention::Args a) {
  constexpr int groups = kThreads / Lanes;
  __shared__ float values[groups * Lanes * kVec];
  __shared__ SoftmaxState states[groups];
  __shared__ float factors[groups];
  __shared__ float mine[kMaxHeadDim + 2], all[8 * (kMaxHeadDim + 2)];

  let_successor_start();
  wait_for_predecessors();
  const int splits = int(gridDim.x), split = int(blockIdx.x);
  const long batch = a.kv_len.shape[0], q_len = a.q.shape[0] / batch, heads = a.q.shape[1],
             capacity = a.k_cache.shape[2];
  const int head_dim = int(a.q.shape[2]);
  const long token = blockIdx.z, head = blockIdx.y, b = token / q_len;
  // A kv_len that the cache has no room for reads nothing; the result is then NaN.
  const long kv_len = a.kv_len.data[b];
  const int keys = kv_len < q_len || kv_len > capacity ? 0 : int(kv_len - q_len + token % q_len + 1);
  const int a_split = (keys + splits - 1) / splits, begin = split * a_split, end = min(begin + a_split, keys);

  const int group = threadIdx.x / Lanes, lane = threadIdx.x % Lanes, column = lane * kVec;
  const bool active = column < head_dim;
  const long cache = (b * heads + head) * capacity * head_dim + column;
  const T *k = static_cast<const T*>(a.k_cache.data) + cache, *v = static_cast<const T*>(a.v_cache.data) + cache;
  float q[kVec] = {}, sum[kVec] = {};
  if (active) load_vec(static_cast<const T*>(a.q.data) + (token * heads + head) * head_dim + column, q);
#pragma unroll
  for (int e = 0; e < kVec; ++e) q[e] *= float(a.scale);

  SoftmaxState state;
  // All groups of a warp go round together, for the shuffles' sake.
  for (int base = begin; base < end; base += groups * kKeysAtOnce) {
    const int first = base + group;
    float key[kKeysAtOnce][kVec] = {}, value[kKeysAtOnce][kVec] = {}, score[kKeysAtOnce];
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      const int j = first + u * groups;
      if (active && j < end) {
        load_vec(k + long(j) * head_dim, key[u]);
        load_vec(v + long(j) * head_dim, value[u]);
      }
    }
    SoftmaxState step;
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      score[u] = 0;
#pragma unroll
      for (int e = 0; e < kVec; ++e) score[u] += q[e] * key[u][e];
#pragma unroll
      for (int offset = Lanes / 2; offset > 0; offset /= 2) score[u] += __shfl_xor_sync(~0u, score[u], offset, Lanes);
      if (first + u * groups >= end) score[u] = -INFINITY;
      step.max = fmaxf(step.max, score[u]);
    }
    const float larger = step.max == -INFINITY ? 0.f : step.max;  // no key for this group: its weights are 0, not NaN
    float weight[kKeysAtOnce];
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) step.sum += weight[u] = expf(score[u] - larger);
    const SoftmaxState::Factors f = state.merge(step);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float s = 0;
#pragma unroll
      for (int u = 0; u < kKeysAtOnce; ++u) s += weight[u] * value[u][e];
      sum[e] = sum[e] * f.mine + s * f.other;
    }
  }
#pragma unroll
  for (int e = 0; e < kVec; ++e) values[group * Lanes * kVec + column + e] = sum[e];
  if (lane == 0) states[group] = state;
  __syncthreads();

  // The groups' states in order: the factors are independent, so that only the sums are a chain.
  const int d = int(threadIdx.x);
  float largest = -INFINITY;
  for (int g = 0; g < groups; ++g) largest = fmaxf(largest, states[g].max);
  if (d < groups) factors[d] = states[d].max == -INFINITY ? 0.f : expf(states[d].max - largest);
  __syncthreads();
  float o = 0, weights = 0;
#pragma unroll 8
  for (int g = 0; g < groups; ++g) {
    weights += states[g].sum * factors[g];
    if (d < head_dim) o += values[g * Lanes * kVec + d] * factors[g];
  }
  if (d == 0) {
    mine[0] = largest;
    mine[1] = weights;
  }
  if (d < head_dim) mine[2 + d] = o;
  cluster_gather(mine, all, head_dim + 2, unsigned(splits));

  // The splits likewise; each block writes its share of the elements.
  if (d < head_dim && d % splits == split) {
    float top = -INFINITY, y = 0, total = 0;
    for (int s = 0; s < splits; ++s) top = fmaxf(top, all[s * (head_dim + 2)]);
    for (int s = 0; s < splits; ++s) {
      const float *part = all + s * (head_dim + 2), factor = expf(part[0] - top);
      y += part[2 + d] * factor;
      total += part[1] * factor;
    }
    static_cast<T*>(a.y.data)[(token * heads + head) * head_dim + d] = from_float<T>(y / total);
  }
}

template <class T>
auto kernel_for(std::int64_t head_dim) {
  return head_dim <= 32    ? attention_kernel<T, 4>
         : head_dim <= 64  ? attention_kernel<T, 8>
         : head_dim <= 128 ? attention_kernel<T, 16>
                           : attention_kernel<T, 32>;
}

}  // namespace

Status run(const ops::Attention::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::Attention::dims(a);
  CF_TRY(check_multiple_of_8(ops::Attention::name, "head_dim", d.head_dim));
  if (d.head_dim > kMaxHeadDim)
    return Status::error(Code::unimplemented, "attention: cuda takes head_dim up to " + std::to_string(kMaxHeadDim) +
                                                  ", got " + std::to_string(d.head_dim));
  const AttentionPlan plan = attention_plan(context.arch(), d.batch * d.q_len * d.heads, d.max_kv_len);
  const LaunchShape shape{.grid = dim3(unsigned(plan.splits), unsigned(d.heads), unsigned(d.batch * d.q_len)),
                          .block = kThreads,
                          .cluster_blocks = plan.splits};
  return with_activation(ops::Attention::name, a.q.dtype, [&](auto zero) {
    return launch(ops::Attention::name, context, shape, kernel_for<decltype(zero)>(d.head_dim), a);
  });
}

}  // namespace cf::cuda
