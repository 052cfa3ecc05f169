#pragma once
// Decode attention, in 16 bits and in float32. attention.cu has the kernels for all keys of one contiguous cache,
// attention_any.cu those for the rest: pages, windows, sinks and streams. attention_runs.cu has the kernels for runs.
#include <type_traits>

#include "cuda/device/compiled_for.hpp"
#include "cuda/device/overwrite.cuh"
#include "cuda/ops/any_cache.hpp"
#include "cuda/ops/attention/attention.cuh"
#include "cuda/ops/run_table.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {

inline constexpr int kDecodeThreads = 32 * kAttentionWarps;
// The threads of a block of the float32 kernel, and how many keys each of its groups loads at once.
inline constexpr int kFloatThreads = 256, kKeysAtOnce = 4;

/// The arguments of the kernel for contiguous caches: every sequence has q_len queries, which see all keys.
struct DecodeCall : AttentionCall {
  /// The sequence of the blocks with this index along z.
  __device__ int sequence(int z) const { return z; }
  /// Whether it has a query i.
  __device__ bool has_query(int, int) const { return true; }
  /// The keys that its query i sees, where the sequence has n valid entries.
  __device__ AllTiles tiles(int, int n, int i, int tile_keys) const { return {visible_keys(n, i), tile_keys}; }
};

/// The arguments of a kernel for caches of every kind. `cache` of AttentionCall is not used.
struct AnyDecodeCall : DecodeCall {
  AnyCacheView any;
  const void* q_sinks;  // null without sinks
  KeyWindow window;
  int pool;  // pages of all sequences; none is read that the table has and the pool has not

  __device__ SeenTiles tiles(int, int n, int i, int tile_keys) const {
    return {window, any.visible_entries(n, q_len, i), tile_keys};
  }
};

/// The same for runs of any counts. `q_len` is the largest count.
struct RunsDecodeCall : AnyDecodeCall {
  RunTable table;

  __device__ int sequence(int z) const { return table.run[z].sequence; }
  __device__ bool has_query(int z, int i) const { return i < table.run[z].count; }
  __device__ SeenTiles tiles(int z, int n, int i, int tile_keys) const {
    return {window, any.visible_entries(n, table.run[z].count, i), tile_keys};
  }
  __device__ long query(int z, int i, int head) const {
    return (long(table.run[z].first_row + i) * heads + head) * head_dim;
  }
};

/// Whether a kernel with these arguments takes a cache of any kind.
template <class Call>
inline constexpr bool takes_any_cache = std::is_base_of_v<AnyDecodeCall, Call>;

/// Blocks of an SM that a kernel's registers leave room for. Many short sequences are faster with four than with the
/// three that the compiler would leave room for in a kernel for any cache. Blackwell has too few registers for four.
template <class Call>
constexpr int least_blocks_per_sm(int padded_head_dim) {
  const bool four = takes_any_cache<Call> && padded_head_dim == 80 && is_hopper(kCompiledFor);
  return four ? 4 : decode_blocks_per_sm(padded_head_dim);
}

/// A page as the table has it. The first of the pool, and `outside` is set, where the pool has no such page.
__device__ inline std::int32_t page_in_pool(std::int32_t page, int pool, bool& outside) {
  if (std::uint32_t(page) < std::uint32_t(pool)) return page;
  outside = true;
  return 0;
}

/// A sequence's pages, 32 at a time in the lanes of a warp, so that few copies wait for the table. All lanes call.
class WarpPages {
 public:
  /// Asks for the first 32 pages. Most caches have no more.
  __device__ WarpPages(const AnyDecodeCall& c, int sequence) : c_(c), sequence_(sequence) {
    if (c.any.in_pages()) load(0);
  }
  /// The sequence's i-th page.
  __device__ std::int32_t operator()(std::uint32_t i) {
    if (i - first_ >= 32) load(i);
    return page_in_pool(__shfl_sync(~0u, page_, int(i - first_)), c_.pool, outside_);
  }
  /// Whether the table had a page that the pool has not.
  __device__ bool outside() const { return outside_; }

 private:
  __device__ void load(std::uint32_t first) {
    first_ = first;
    page_ = c_.any.page(sequence_, min(int(first + threadIdx.x % 32), c_.any.pages() - 1));
  }

  const AnyDecodeCall& c_;
  int sequence_;
  bool outside_ = false;
  std::uint32_t first_ = 0;
  std::int32_t page_ = 0;
};

/// What a kernel for contiguous caches has in the place of WarpPages.
struct NoPages {
  __device__ NoPages(const AttentionCall&, int) {}
};

/// A block attends with one query of each head of a GQA tile to one split of their keys. The blocks of a tile's splits
/// form a cluster. The copy engine fills a ring of tiles, and each warp attends to a part of a tile's keys. The warps
/// wait for each other before a tile is overwritten. At the end the warps' partial results are merged in order, and
/// then those of the splits. With `after_waiting` the block copies its first tiles, but for the newest key, before it
/// waits for its predecessors: LaunchMode::after_waiting. Without Shared a GQA tile is a lone head. That kernel has no
/// code for several heads, which makes layers slower (kH200Tuning). Call is DecodeCall, AnyDecodeCall or RunsDecodeCall;
/// the last two have no kernel of lone heads, whose bits are the same.
template <class T, int HeadDim, bool Shared, class Call>
__global__ void __launch_bounds__(kDecodeThreads, least_blocks_per_sm<Call>(HeadDim))
    decode_kernel(const __grid_constant__ Call c, int gqa_heads, int splits, int stages, bool after_waiting) {
  constexpr bool any = takes_any_cache<Call>;
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

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, z = blockIdx.z, b = c.sequence(z);
  const int first_head = int(blockIdx.y) * heads, kv_head = c.kv_head(first_head);
  const int kv_len = c.kv_len[b];  // its load and that of the pages are in flight while the barriers are made
  std::conditional_t<any, WarpPages, NoPages> pages(c, b);
  if (threadIdx.x < kMaxStages) {
    init_barrier(full + threadIdx.x, kTileArrivals);
    publish_barriers();
  }
  ClusterInbox inbox(&arrived);
  inbox.open();
  __syncthreads();

  const int split = int(blockIdx.x) % splits, i = int(blockIdx.x) / splits;
  if (!c.has_query(z, i)) return;
  const auto seen = c.tiles(z, kv_len, i, tile_keys);
  const SplitTiles own(seen.count(), splits, split);
  if (split >= own.used) return;
  if constexpr (any)
    if (seen.count() == 0) {  // most of many sequences may be idle
      T* const y = static_cast<T*>(c.y) + c.query(z, i, first_head);
      for (int e = threadIdx.x; e < heads * c.head_dim; e += kDecodeThreads) y[e] = from_float<T>(NAN);
      return;
    }
  // With after_waiting the predecessors write no key but the newest. Its run is copied when they are done.
  int newest = after_waiting ? seen.newest() / (tile_keys / 8) : -1;
  const auto fetch = [&](int tile, int to, bool only_newest) {
    if (tile >= own.end) return;
    if constexpr (any) {
      constexpr int run = tile_keys / 8;
      const T *const k = static_cast<const T*>(c.k_cache), *const v = static_cast<const T*>(c.v_cache);
      const int first = seen.first_key(tile), keys = seen.keys_from(tile);
      copy_tile<tile_keys>(ring + to * stage, keys, c.head_dim, full + to, newest - tile * 8, only_newest,
                           [&](T* to_keys, T* to_values, int r, int, int) {
                             const int end = min(keys, (r + 1) * run);
                             for (int key = r * run, at = 0; key < end;) {
                               const CacheRows rows = c.any.rows(b, kv_head, first + key, end - key, pages);
                               const int elements = int(rows.count) * c.head_dim, bytes = elements * int(sizeof(T));
                               if (elected()) {
                                 copy_bulk(to_keys + at, k + rows.first, bytes, full + to);
                                 copy_bulk(to_values + at, v + rows.first, bytes, full + to);
                               }
                               key += int(rows.count);
                               at += elements;
                             }
                           });
    } else {
      // From the head's first entry on. A tile's own entry takes registers that head_dim 256 does not have on sm_120a.
      const long first = c.cache.rows(b, kv_head, 0, tile_keys).first + long(tile) * tile_keys * c.head_dim;
      copy_tile<tile_keys>(ring + to * stage, static_cast<const T*>(c.k_cache) + first,
                           static_cast<const T*>(c.v_cache) + first, seen.keys_from(tile), c.head_dim, full + to,
                           newest - tile * 8, only_newest);
    }
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
  const auto query = [&](const void* q) {
    return g < heads ? static_cast<const T*>(q) + c.query(z, i, first_head + g) : nullptr;
  };
  AttentionRows<T, HeadDim, tile_keys, warp_keys, 1> rows(c.head_dim,
                                                          [&](int, int) { return any ? nullptr : query(c.q); });
  const int first = warp * warp_keys / 8;  // the warp's first key of each run
  for (int tile = own.begin, s = 0, phase = 0; tile < own.end; ++tile) {
    if constexpr (any)
      if (tile == own.begin || tile == seen.sink_tiles())
        load_queries<T, HeadDim, 1>(rows.q[0], c.head_dim,
                                    [&](int) { return query(tile < seen.sink_tiles() ? c.q_sinks : c.q); });
    const int visible = seen.keys_from(tile);
    // The lanes that store the zeros behind the last value do not arrive at the tile's barrier.
    if (visible < tile_keys) {
      if constexpr (any) let_copies_overwrite();  // behind the sinks' last tile there are others
      __syncthreads();
    }
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
  float weights = rows.weights(0, 0);
  if constexpr (any)
    if (pages.outside()) weights = NAN;
  // Four lanes hold all columns of a row.
  const int t = Shared ? lane % 4 : lane;
  if (t == 0 && g < heads) *reinterpret_cast<float2*>(part + c.head_dim) = {rows.state[0][0].max, weights};
  if (t < 4 && g < heads)
#pragma unroll
    for (int n = 0; n < HeadDim / 8; ++n)
      if (8 * n < c.head_dim)
        *reinterpret_cast<float2*>(part + 8 * n + 2 * t) = {rows.values[0][n][0] + rows.values[0][n][2],
                                                            rows.values[0][n][1] + rows.values[0][n][3]};
  T* const y = static_cast<T*>(c.y) + c.query(z, i, first_head);
  if constexpr (Shared)
    finish_gqa_tile(parts, kAttentionWarps, heads, sent, inbox, split, own.used, c.head_dim, y);
  else
    finish_attention(parts, kAttentionWarps, sent, inbox, split, own.used, c.head_dim, y);
}

/// decode_kernel() in float32 arithmetic without tensor cores. A group of Lanes lanes holds a key, eight elements a
/// lane. Key i of the split belongs to group i % groups. A block has one head, whatever the head's group: the kernel is
/// the reference path.
template <int Lanes, class Call>
__global__ void __launch_bounds__(kFloatThreads) float_kernel(const __grid_constant__ Call c, int splits) {
  constexpr int groups = kFloatThreads / Lanes;
  __shared__ __align__(16) float parts[groups * part_floats(Lanes * kVec)],
      sent[kMaxSplits * part_floats(Lanes * kVec)];
  __shared__ std::uint64_t arrived;
  ClusterInbox inbox(&arrived);
  inbox.open();
  let_successor_start();
  wait_for_predecessors();

  const int group = threadIdx.x / Lanes, lane = threadIdx.x % Lanes, column = lane * kVec, z = blockIdx.z,
            head = blockIdx.y, b = c.sequence(z);
  const int split = int(blockIdx.x) % splits, i = int(blockIdx.x) / splits;
  if (!c.has_query(z, i)) return;
  const int kv_len = c.kv_len[b], tile_keys = decode_tile(padded_head_dim(c.head_dim));
  const auto seen = c.tiles(z, kv_len, i, tile_keys);
  const SplitTiles own(seen.count(), splits, split);
  if (split >= own.used) return;

  const bool active = column < c.head_dim;
  const float *const k_cache = static_cast<const float*>(c.k_cache) + column, *const v_cache =
                                                                                  static_cast<const float*>(c.v_cache) +
                                                                                  column;
  float q[kVec] = {}, sum[kVec] = {};
  SoftmaxState state;
  const auto load_query = [&](const void* from) {
    if (active) load_vec(static_cast<const float*>(from) + c.query(z, i, head) + column, q);
#pragma unroll
    for (int e = 0; e < kVec; ++e) q[e] *= c.scale;
  };
  // Attends to keys [begin, end). Key j is at(j) elements behind k, its value as many behind v.
  const auto attend = [&](const float* k, const float* v, int begin, int end, auto at) {
    // All groups of a warp take the same number of rounds, since the shuffles need every lane.
    for (int base = begin; base < end; base += groups * kKeysAtOnce) {
      const int first = base + group;
      float key[kKeysAtOnce][kVec] = {}, value[kKeysAtOnce][kVec] = {}, score[kKeysAtOnce];
#pragma unroll
      for (int u = 0; u < kKeysAtOnce; ++u) {
        const int j = first + u * groups;
        if (active && j < end) {
          load_vec(k + at(j), key[u]);
          load_vec(v + at(j), value[u]);
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
  };
  bool outside = false;  // the table had a page that the pool has not
  if constexpr (takes_any_cache<Call>) {
    const auto page_of = [&](std::uint32_t page) { return page_in_pool(c.any.page(b, page), c.pool, outside); };
#pragma unroll 1
    for (int window = 0; window <= 1; ++window) {  // the sinks' tiles, then the window's
      const int begin = window ? max(own.begin, seen.sink_tiles()) : own.begin,
                end = window ? own.end : min(own.end, seen.sink_tiles());
      if (begin >= end) continue;
      load_query(window ? c.q : c.q_sinks);
      const int first = seen.first_key(begin), keys = min((end - begin) * tile_keys, seen.keys_from(begin));
      attend(static_cast<const float*>(c.k_cache) + column, static_cast<const float*>(c.v_cache) + column, 0, keys,
             [&](int j) { return long(c.any.rows(b, c.kv_head(head), first + j, 1, page_of).first); });
    }
  } else {
    const int begin = own.begin * tile_keys, end = min(own.end * tile_keys, seen.keys_from(0));
    const long first_key = c.cache.rows(b, c.kv_head(head), 0, end).first + column;
    const float *const k = static_cast<const float*>(c.k_cache) + first_key, *const v =
                                                                                 static_cast<const float*>(c.v_cache) +
                                                                                 first_key;
    load_query(c.q);
    attend(k, v, begin, end, [&](int j) { return long(j) * c.head_dim; });
  }
  float* part = parts + group * part_floats(c.head_dim);
  if (active) store_vec(part + column, sum);
  if (lane == 0) *reinterpret_cast<float2*>(part + c.head_dim) = {state.max, outside ? NAN : state.sum};
  finish_attention(parts, groups, sent, inbox, split, own.used, c.head_dim,
                   static_cast<float*>(c.y) + c.query(z, i, head));
}

template <class Call>
auto float_kernel_for(int head_dim) {
  return head_dim <= 64 ? float_kernel<8, Call> : head_dim <= 128 ? float_kernel<16, Call> : float_kernel<32, Call>;
}

template <class T, bool Shared, class Call>
auto decode_kernel_for(int head_dim) {
  switch (padded_head_dim(head_dim)) {
    case 64: return decode_kernel<T, 64, Shared, Call>;
    case 80: return decode_kernel<T, 80, Shared, Call>;
    case 128: return decode_kernel<T, 128, Shared, Call>;
    default: return decode_kernel<T, kMaxHeadDim, Shared, Call>;
  }
}

/// The blocks along z of one launch, and the most queries that one of them has.
struct DecodeRuns {
  std::int64_t runs, most;
};

template <class Call>
Status launch_float(const DecodeRuns& r, const Call& call, const FloatAttentionPlan& plan, LaunchList& launches) {
  const LaunchShape shape{.grid = dim3(unsigned(r.most * plan.splits), unsigned(call.heads), unsigned(r.runs)),
                          .block = kFloatThreads,
                          .cluster_blocks = plan.splits};
  return launch(ops::Attention::name, launches, shape, float_kernel_for<Call>(call.head_dim), call, plan.splits);
}

template <class Call>
Status launch_decode(const DecodeRuns& r, DType activation, const Call& call, const AttentionPlan& plan,
                     LaunchList& launches) {
  const LaunchShape shape{
      .grid = dim3(unsigned(r.most * plan.splits), unsigned(call.heads / plan.gqa_heads), unsigned(r.runs)),
      .block = kDecodeThreads,
      .smem_bytes = std::size_t(plan.smem_bytes),
      .cluster_blocks = plan.splits};
  // With one token a sequence all keys but the newest are older than the predecessors.
  const bool after_waiting = launches.mode().after_waiting && r.most == 1;
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    auto kernel = decode_kernel_for<T, true, Call>(call.head_dim);
    if constexpr (!takes_any_cache<Call>)
      if (plan.gqa_heads == 1) kernel = decode_kernel_for<T, false, Call>(call.head_dim);
    return launch(ops::Attention::name, launches, shape, kernel, call, plan.gqa_heads, plan.splits, plan.stages,
                  after_waiting);
  };
  return activation == DType::f16 ? add(f16{}) : add(bf16{});
}

/// The arguments for a cache of any kind.
AnyDecodeCall any_decode_call(const ops::Attention::Args& a);
// attention_any.cu. The arguments ask for more than all keys of a contiguous cache: needs_any_cache().
Status launch_any_float(const ops::Attention::Args& a, const FloatAttentionPlan& plan, LaunchList& launches);
Status launch_any_decode(const ops::Attention::Args& a, const AttentionPlan& plan, LaunchList& launches);

}  // namespace cf::cuda
