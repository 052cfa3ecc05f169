#include "cuda/ops/attention/attention.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

constexpr int kDecodeThreads = 32 * kAttentionWarps;
// The threads of a block of the float32 kernel, and how many keys each of its groups loads at once.
constexpr int kThreads = 256, kKeysAtOnce = 4;

/// A block attends with one query of each head of a GQA tile to one split of their keys. The blocks of a tile's splits
/// form a cluster. The copy engine fills a ring of tiles, and each warp attends to a part of a tile's keys. The warps
/// wait for each other before a tile is overwritten. At the end the warps' partial results are merged in order, and
/// then those of the splits. With `after_waiting` the block copies its first tiles, but for the newest key, before it
/// waits for its predecessors: LaunchMode::after_waiting. Without Shared a GQA tile is a lone head. That kernel has no
/// code for several heads, which makes layers slower (kH200Tuning).
template <class T, int HeadDim, bool Shared>
__global__ void __launch_bounds__(kDecodeThreads, decode_blocks_per_sm(HeadDim))
    decode_kernel(const __grid_constant__ AttentionCall c, int gqa_heads, int splits, int stages, bool after_waiting) {
  constexpr int warp_keys = keys_at_once(HeadDim), tile_keys = decode_tile(HeadDim);
  constexpr int stage = tile_bytes(tile_keys, HeadDim) / int(sizeof(T));
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ std::uint64_t arrived, full[kMaxStages];
  const int heads = Shared ? gqa_heads : 1;
  float *const sent = reinterpret_cast<float*>(smem), *const behind = sent + inbox_parts(heads) * part_floats(HeadDim);
  T* const ring = reinterpret_cast<T*>(behind + (Shared ? 0 : kAttentionWarps * part_floats(HeadDim)));
  float* const parts = Shared ? reinterpret_cast<float*>(ring) : behind;
  let_successor_start();
  if (!after_waiting) wait_for_predecessors();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, b = blockIdx.z;
  const int first_head = int(blockIdx.y) * heads, kv_head = c.kv_head(first_head);
  const int kv_len = c.kv_len[b];  // its load is in flight while the barriers are made
  if (threadIdx.x < kMaxStages) {
    init_barrier(full + threadIdx.x, kTileArrivals);
    publish_barriers();
  }
  ClusterInbox inbox(&arrived);
  inbox.open();
  __syncthreads();

  const int split = int(blockIdx.x) % splits, i = int(blockIdx.x) / splits;
  const int keys = c.visible_keys(kv_len, i);
  const SplitTiles own((keys + tile_keys - 1) / tile_keys, splits, split);
  if (split >= own.used) return;
  // With after_waiting the predecessors write no key but the newest. Its run is copied when they are done.
  int newest = after_waiting ? (keys - 1) / (tile_keys / 8) : -1;
  const auto fetch = [&](int tile, int to, bool only_newest) {
    if (tile >= own.end) return;
    // From the head's first entry on. A tile's own entry takes registers that head_dim 256 does not have on sm_120a.
    const long first = c.cache.rows(b, kv_head, 0, tile_keys).first + long(tile) * tile_keys * c.head_dim;
    copy_tile<tile_keys>(ring + to * stage, static_cast<const T*>(c.k_cache) + first,
                         static_cast<const T*>(c.v_cache) + first, keys - tile * tile_keys, c.head_dim, full + to,
                         newest - tile * 8, only_newest);
  };
#pragma unroll 1
  for (int pass = 0; pass <= int(after_waiting); ++pass) {
    if (pass == 1) wait_for_predecessors();
#pragma unroll 1
    for (int s = 0; s < stages; ++s) fetch(own.begin + s, s, pass == 1);
  }
  newest = -1;  // the tiles that follow are copied whole

  // Row g of the operand is head g of the GQA tile. A lone head is every row.
  const int g = Shared ? lane / 4 : 0;
  AttentionRows<T, HeadDim, tile_keys, warp_keys, 1> rows(c.head_dim, [&](int, int) {
    return g < heads ? static_cast<const T*>(c.q) + c.query(b, i, first_head + g) : nullptr;
  });
  const int first = warp * warp_keys / 8;  // the warp's first key of each run
  for (int tile = own.begin, s = 0, phase = 0; tile < own.end; ++tile) {
    const int visible = keys - tile * tile_keys;
    // The lanes that store the zeros behind the last value do not arrive at the tile's barrier.
    if (visible < tile_keys) __syncthreads();
    wait_barrier(full + s, phase);
    if (first < visible) rows.attend(ring + s * stage, first, c.scale, [=](int, int) { return visible; });
    if (tile + stages < own.end) {
      __syncthreads();  // all warps have read the tile
      fetch(tile + stages, s, false);
    }
    if (++s == stages) {
      s = 0;
      phase ^= 1;
    }
  }

  if constexpr (Shared) __syncthreads();  // all warps have read the ring, where the partial results go
  float* part = parts + (g * kAttentionWarps + warp) * part_floats(c.head_dim);
  const float weights = rows.weights(0, 0);
  // Four lanes hold all columns of a row.
  const int t = Shared ? lane % 4 : lane;
  if (t == 0 && g < heads) *reinterpret_cast<float2*>(part + c.head_dim) = {rows.state[0][0].max, weights};
  if (t < 4 && g < heads)
#pragma unroll
    for (int n = 0; n < HeadDim / 8; ++n)
      if (8 * n < c.head_dim)
        *reinterpret_cast<float2*>(part + 8 * n + 2 * t) = {rows.values[0][n][0] + rows.values[0][n][2],
                                                            rows.values[0][n][1] + rows.values[0][n][3]};
  T* const y = static_cast<T*>(c.y) + c.query(b, i, first_head);
  if constexpr (Shared)
    finish_gqa_tile(parts, kAttentionWarps, heads, sent, inbox, split, own.used, c.head_dim, y);
  else
    finish_attention(parts, kAttentionWarps, sent, inbox, split, own.used, c.head_dim, y);
}

/// decode_kernel() in float32 arithmetic without tensor cores. A group of Lanes lanes holds a key, eight elements a
/// lane. Key i of the split belongs to group i % groups. A block has one head, whatever the head's group: the kernel is
/// the reference path.
template <int Lanes>
__global__ void __launch_bounds__(kThreads) float_kernel(const __grid_constant__ AttentionCall c, int splits) {
  constexpr int groups = kThreads / Lanes;
  __shared__ __align__(16) float parts[groups * part_floats(Lanes * kVec)],
      sent[kMaxSplits * part_floats(Lanes * kVec)];
  __shared__ std::uint64_t arrived;
  ClusterInbox inbox(&arrived);
  inbox.open();
  let_successor_start();
  wait_for_predecessors();

  const int group = threadIdx.x / Lanes, lane = threadIdx.x % Lanes, column = lane * kVec, b = blockIdx.z,
            head = blockIdx.y;
  const int split = int(blockIdx.x) % splits, i = int(blockIdx.x) / splits;
  const int keys = c.visible_keys(c.kv_len[b], i), tile_keys = decode_tile(padded_head_dim(c.head_dim));
  const SplitTiles own((keys + tile_keys - 1) / tile_keys, splits, split);
  if (split >= own.used) return;
  const int begin = own.begin * tile_keys, end = min(own.end * tile_keys, keys);

  const bool active = column < c.head_dim;
  const long first_key = c.cache.rows(b, c.kv_head(head), 0, end).first + column;
  const float *k = static_cast<const float*>(c.k_cache) + first_key,
              *v = static_cast<const float*>(c.v_cache) + first_key;
  float q[kVec] = {}, sum[kVec] = {};
  if (active) load_vec(static_cast<const float*>(c.q) + c.query(b, i, head) + column, q);
#pragma unroll
  for (int e = 0; e < kVec; ++e) q[e] *= c.scale;

  SoftmaxState state;
  // All groups of a warp take the same number of rounds, since the shuffles need every lane.
  for (int base = begin; base < end; base += groups * kKeysAtOnce) {
    const int first = base + group;
    float key[kKeysAtOnce][kVec] = {}, value[kKeysAtOnce][kVec] = {}, score[kKeysAtOnce];
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      const int j = first + u * groups;
      if (active && j < end) {
        load_vec(k + long(j) * c.head_dim, key[u]);
        load_vec(v + long(j) * c.head_dim, value[u]);
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
    const float larger = step.max == -INFINITY ? 0.f : step.max;  // without a key the weights are 0, not NaN
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
  float* part = parts + group * part_floats(c.head_dim);
  if (active) store_vec(part + column, sum);
  if (lane == 0) *reinterpret_cast<float2*>(part + c.head_dim) = {state.max, state.sum};
  finish_attention(parts, groups, sent, inbox, split, own.used, c.head_dim,
                   static_cast<float*>(c.y) + c.query(b, i, head));
}

auto float_kernel_for(int head_dim) {
  return head_dim <= 64 ? float_kernel<8> : head_dim <= 128 ? float_kernel<16> : float_kernel<32>;
}

template <class T, bool Shared>
auto decode_kernel_for(int head_dim) {
  switch (padded_head_dim(head_dim)) {
    case 64: return decode_kernel<T, 64, Shared>;
    case 80: return decode_kernel<T, 80, Shared>;
    case 128: return decode_kernel<T, 128, Shared>;
    default: return decode_kernel<T, kMaxHeadDim, Shared>;
  }
}

}  // namespace

Status prepare(const ops::Attention::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

AttentionCall attention_call(const ops::Attention::Args& a) {
  const auto d = ops::Attention::dims(a);
  return {.q = a.q.data,
          .k_cache = a.k_cache.data,
          .v_cache = a.v_cache.data,
          .kv_len = a.kv_len.data,
          .y = a.y.data,
          .scale = float(a.scale),
          .q_len = int(d.q_len),
          .heads = int(d.heads),
          .head_dim = int(d.head_dim),
          .group = HeadGroup(d.heads / d.kv_heads),
          .cache = CacheView(a.k_cache)};
}

Status launch_attention_f32(const ops::Attention::Args& a, const FloatAttentionPlan& plan, LaunchList& launches) {
  const auto d = ops::Attention::dims(a);
  const LaunchShape shape{.grid = dim3(unsigned(d.q_len * plan.splits), unsigned(d.heads), unsigned(d.batch)),
                          .block = kThreads,
                          .cluster_blocks = plan.splits};
  return launch(ops::Attention::name, launches, shape, float_kernel_for(int(d.head_dim)), attention_call(a),
                plan.splits);
}

Status launch_attention_decode(const ops::Attention::Args& a, const AttentionPlan& plan, LaunchList& launches) {
  const auto d = ops::Attention::dims(a);
  const LaunchShape shape{
      .grid = dim3(unsigned(d.q_len * plan.splits), unsigned(d.heads / plan.gqa_heads), unsigned(d.batch)),
      .block = kDecodeThreads,
      .smem_bytes = std::size_t(plan.smem_bytes),
      .cluster_blocks = plan.splits};
  // With one token a sequence all keys but the newest are older than the predecessors.
  const bool after_waiting = launches.mode().after_waiting && d.q_len == 1;
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    const int head_dim = int(d.head_dim);
    const auto kernel =
        plan.gqa_heads > 1 ? decode_kernel_for<T, true>(head_dim) : decode_kernel_for<T, false>(head_dim);
    return launch(ops::Attention::name, launches, shape, kernel, attention_call(a), plan.gqa_heads, plan.splits,
                  plan.stages, after_waiting);
  };
  return a.q.dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
