#pragma once
// Decode attention over key splits. The product warps of a block attend to the keys of a split on tensor cores; its
// helper warps merge the warps' partial results; the helper warps of a head's first split merge those of all its
// splits.
#include "cuda/device/softmax.cuh"
#include "cuda/persistent/block.cuh"
#include "cuda/persistent/ring.cuh"

namespace cf::cuda {

/// One split of the keys that a head of a sequence attends to. The cached keys come through the ring; the newest key is
/// made by this launch. Key split i belongs to block i % grid.
struct KeySplit {
  int sequence, head, split;
  int kv_head;        // whose keys and values the head's group of query heads shares
  int kv_len;         // 0 where it is below 1 or beyond the capacity
  int begin, end;     // keys
  int end_of_cached;  // keys [begin, end_of_cached) come from the cache

  /// `token` counts the launch's tokens: each has one key more than the one before.
  __device__ KeySplit(const PersistentArguments& c, int item, int token) {
    split = item % c.plan.attention_splits;
    head = item / c.plan.attention_splits % c.dims.heads;
    sequence = item / c.plan.attention_splits / c.dims.heads;
    kv_head = c.dims.group == 1 ? head : head / c.dims.group;  // the division takes long
    const int length = reinterpret_cast<const int*>(block_smem + c.layout.lengths)[sequence] + token;
    kv_len = length < 1 || length > c.capacity ? 0 : length;
    // Whole tiles of keys: a split's copies then begin at a line of memory, as its head's entries do.
    const int keys =
        ((kv_len + c.plan.attention_splits - 1) / c.plan.attention_splits + kTileKeys - 1) / kTileKeys * kTileKeys;
    begin = min(split * keys, kv_len);
    end = min(begin + keys, kv_len);
    end_of_cached = begin < end && end == kv_len ? end - 1 : end;
  }
  /// Key splits of all heads and sequences.
  static __device__ int count(const PersistentArguments& c) {
    return c.dims.batch * c.dims.heads * c.plan.attention_splits;
  }
  __device__ bool has_newest() const { return end_of_cached < end; }
  /// The head's number among those of all sequences.
  __device__ long batch_head(const PersistentArguments& c) const { return long(sequence) * c.dims.heads + head; }
  /// The same of the heads of k and v.
  __device__ long batch_kv_head(const PersistentArguments& c) const {
    return long(sequence) * c.dims.kv_heads + kv_head;
  }
  /// Whether the head is the first of its group: that one stores what the group shares.
  __device__ bool leads_group(const PersistentArguments& c) const { return kv_head * c.dims.group == head; }
  /// The row of the cache (batch, kv_heads, capacity, head_dim) that holds a key.
  __device__ long row(const PersistentArguments& c, int key) const { return batch_kv_head(c) * c.capacity + key; }
  /// Stages of the ring that bring the cached keys. A stage holds some keys, then their values.
  __device__ int stages(const PersistentArguments& c) const {
    return (end_of_cached - begin + c.plan.stage_keys - 1) / c.plan.stage_keys;
  }
};

/// Streams the cached keys and values of the block's key splits. False where nobody empties the ring any more.
__device__ inline bool stream_keys(RingWriter& ring, const PersistentArguments& c, int token, const char* k_cache,
                                   const char* v_cache) {
#pragma unroll 1
  for (int item = int(blockIdx.x); item < KeySplit::count(c); item += c.plan.grid) {
    const KeySplit split(c, item, token);
#pragma unroll 1
    for (int key = split.begin; key < split.end_of_cached; key += c.plan.stage_keys) {
      const int bytes = min(c.plan.stage_keys, split.end_of_cached - key) * c.dims.head_dim * 2;
      const long from = split.row(c, key) * c.dims.head_dim * 2;
      if (!ring.next()) return false;
      ring.expect(2 * bytes);
      if (threadIdx.x % 32 == 0) {
        ring.copy(0, k_cache + from, bytes);
        ring.copy(bytes, v_cache + from, bytes);
      }
    }
  }
  return true;
}

/// A warp's softmax-weighted sum in progress. Scores and sums are made of 16 x 16 blocks of keys and elements: `Blocks`
/// blocks hold the largest head_dim of the instantiation, and what lies beyond head_dim is left out. All eight groups
/// of four lanes hold the same weights, four keys a lane.
template <class T, int Blocks>
struct AttentionTile {
  static constexpr int kKeys = kTileKeys;
  float sum[Blocks][4] = {};  // [i][0] + [i][1]: element 16 i + lane / 4; [i][2] + [i][3]: 8 further
  SoftmaxState state;         // its sum is over the lane's own keys

  /// Adds 1 to 16 keys and their values. All lie in shared memory.
  __device__ void add(const T* query, const T* k, const T* v, int keys, int head_dim, float scale) {
    const int lane = int(threadIdx.x) % 32, t = lane % 4;
    // Lanes beyond the last key load the last key.
    const T* const key = k + min(lane / 16 * 8 + lane % 8, keys - 1) * head_dim + lane / 8 % 2 * 8;
    const std::uint32_t* const pairs = reinterpret_cast<const std::uint32_t*>(query) + t;
    float score[2][4] = {};
#pragma unroll(Blocks > 8 ? 4 : Blocks)  // registers hold no more
    for (int i = 0; i < Blocks; ++i) {
      const bool none = i * 16 >= head_dim, half = i * 16 + 8 >= head_dim;
      uint4 m = load_matrices(shared_address(key) + 2 * (none ? 0 : half && lane / 8 % 2 ? i * 16 - 8 : i * 16));
      if (none) m.x = m.z = 0;
      if (half) m.y = m.w = 0;
      const std::uint32_t q_low = none ? 0 : pairs[i * 8], q_high = half ? 0 : pairs[i * 8 + 4];
      mma(score[0], q_low, q_low, q_high, q_high, m.x, m.y, T{});
      mma(score[1], q_low, q_low, q_high, q_high, m.z, m.w, T{});
    }
    float s[4] = {score[0][0], score[0][1], score[1][0], score[1][1]};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e / 2 * 8 + 2 * t + e % 2 >= keys) s[e] = -INFINITY;
    weigh<4, false>(
        state, scale, [&](int e) -> float& { return s[e]; },
        [&](float factor) {
#pragma unroll
          for (int i = 0; i < Blocks; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][e] *= factor;
        });
    // Even columns of the second product carry the weights rounded to T, odd columns the remainders.
    std::uint32_t weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T two[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float w = s[2 * h + e];
        two[e] = from_float<T>(w);
        if (lane / 4 % 2) two[e] = from_float<T>(w - to_float(two[e]));
      }
      weight[h] = two[0].bits | std::uint32_t(two[1].bits) << 16;
    }
    const auto there = [&](int first) { return (first < keys ? 0xffffu : 0) | (first + 1 < keys ? 0xffff0000u : 0); };
    const std::uint32_t low = there(2 * t), high = there(2 * t + 8);
    const T* const value = v + min(lane / 16 * 8 + lane % 8, keys - 1) * head_dim + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
      const bool none = i * 16 >= head_dim, half = i * 16 + 8 >= head_dim;
      const uint4 m = load_matrices_transposed(shared_address(value) + 2 * (none                   ? 0
                                                                            : half && lane / 8 % 2 ? i * 16 - 8
                                                                                                   : i * 16));
      mma(sum[i], m.x & low, m.y & low, m.z & high, m.w & high, weight[0], weight[1], T{});
    }
  }

  /// Stores the warp's sums and their state in shared memory.
  __device__ void store(float* values, SoftmaxState* states, int head_dim) {
    const int lane = thread_index() % 32;
    state.sum = quad_sum(state.sum);
    if (lane == 0) *states = state;
    if (lane % 4) return;
#pragma unroll
    for (int i = 0; i < Blocks; ++i)
      if (i * 16 < head_dim) {
        values[i * 16 + lane / 4] = sum[i][0] + sum[i][1];
        if (i * 16 + 8 < head_dim) values[i * 16 + 8 + lane / 4] = sum[i][2] + sum[i][3];
      }
  }
};

/// Waits for q, k and v of a head's new token, rotates q and k by RoPE, rounds them to T and stores all three in the
/// block's shared memory. The block of the split with the newest key appends k and v to the cache: of heads that share
/// them, that of the first head. A position outside the RoPE table makes the rotated elements NaN. False where the wait
/// took too long.
template <class T>
__device__ bool prepare_head(const Block& block, const KeySplit& split, int layer) {
  const PersistentArguments& c = block.c;
  const int head_dim = c.dims.head_dim, half = c.dims.half_rotary, d = block.thread();
  static_assert(kProductThreads >= kMaxPersistentHeadDim);
  const unsigned tag = block.tag(layer);
  // A thread has one element each of q, k and v, and the partners that RoPE rotates those of q and k with.
  const bool has_element = d < head_dim, rotated = has_element && d < 2 * half;
  const QkvPlaces& places = c.dims.places;
  const TaggedElement* const qkv = c.qkv + long(split.sequence) * c.dims.qkv_rows;
  const TaggedElement* const of_head[3] = {qkv + split.head * places.q_step,
                                           qkv + places.k_first + split.kv_head * places.kv_step,
                                           qkv + places.v_first + split.kv_head * places.kv_step};
  const int other = d < half ? d + half : d - half;
  TaggedElement element[3] = {}, partner[2] = {};
  block.poll(layer, Dependency::qkv, [&] {
    bool here = true;
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      if (has_element) element[of] = load_relaxed(of_head[of] + d);
      if (of < 2 && rotated) partner[of] = load_relaxed(of_head[of] + other);
    }
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      if (has_element) here = here && has_tag(element[of], tag);
      if (of < 2 && rotated) here = here && has_tag(partner[of], tag);
    }
    return here;
  });
  block.sync();  // all warps have read the new token of the split before

  T* const new_token = block.at<T>(c.layout.new_token);
  const float* const angles = block.at<float>(c.layout.angles) + split.sequence * 2 * half + (d < half ? d : d - half);
  const bool leads_group = split.leads_group(c);
  const long q_at = split.batch_head(c) * head_dim + d, kv_at = split.batch_kv_head(c) * head_dim + d,
             row = split.row(c, split.kv_len - 1) * head_dim + d;
  if (has_element)
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      T stored{std::uint16_t(element[of])};
      if (of < 2 && rotated) {
        float value = to_float(stored), with = to_float(T{std::uint16_t(partner[of])});
        if (d < half)
          rotate(value, with, angles[0], angles[half]);
        else
          rotate(with, value, angles[0], angles[half]);
        stored = from_float<T>(value);
      }
      new_token[of * head_dim + d] = stored;
      if (of > 0 && !leads_group) continue;
      if (T* const tap = static_cast<T*>(of == 0 ? c.taps.q : of == 1 ? c.taps.k : c.taps.v); tap && split.split == 0)
        tap[of == 0 ? q_at : kv_at] = stored;
      if (of > 0 && split.has_newest()) {
        const CachePointers& cache = block.pointers(layer).cache;
        __stcg(reinterpret_cast<unsigned short*>(of == 1 ? cache.k : cache.v) + row, stored.bits);
      }
    }
  return block.sync_unless_stopped();
}

/// Merges `count` partial results, up to 32, in a fixed order; each helper warp merges all of them for its own
/// elements. state(i) and value(i, d) read the i-th; store(d, sum, state) takes the merged element d.
template <class State, class Value, class Store>
__device__ void merge_partials(const Block& block, int count, State state, Value value, Store store) {
  const int thread = block.thread(), lane = thread % 32;
  SoftmaxState own;
  if (lane < count) own = state(lane);
  SoftmaxState whole{.max = own.max, .sum = 0};
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) whole.max = fmaxf(whole.max, __shfl_xor_sync(~0u, whole.max, offset));
  const float factor = own.factor(whole.max);  // 0 for an empty state, that of a split without keys too
  whole.sum = warp_sum(own.sum * factor);
#pragma unroll 1
  for (int d = thread; d - lane < block.c.dims.head_dim; d += kHelperThreads) {
    const bool has_element = d < block.c.dims.head_dim;
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < count; ++i) sum += (has_element ? value(i, d) : 0.f) * __shfl_sync(~0u, factor, i);
    if (has_element) store(d, sum, whole);
  }
}

}  // namespace cf::cuda
