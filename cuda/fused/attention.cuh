#pragma once
// Decode attention in parts: a block's products' warps take some of a head's keys, on tensor cores, its helpers merge
// what they made, and those of a head's first part what all its parts' blocks made.
#include "cuda/fused/block.cuh"
#include "cuda/fused/ring.cuh"

namespace cf::cuda {

/// One split of one head's keys. Old keys come from the cache, through the ring; the newest is this launch's own.
struct AttentionPart {
  int sequence, head, split;
  int kv_len;      // 0 where the cache has no room for it
  int begin, end;  // keys
  int old;         // those below come from the cache

  __device__ AttentionPart(const DecodeCall& c, int item) {
    split = item % c.plan.attention_splits;
    head = item / c.plan.attention_splits % c.dims.heads;
    sequence = item / c.plan.attention_splits / c.dims.heads;
    const int length = reinterpret_cast<const int*>(decode_smem + c.layout.lengths)[sequence];
    kv_len = length < 1 || length > c.dims.capacity ? 0 : length;
    const int keys = (kv_len + c.plan.attention_splits - 1) / c.plan.attention_splits;
    begin = min(split * keys, kv_len);
    end = min(begin + keys, kv_len);
    old = begin < end && end == kv_len ? end - 1 : end;
  }
  /// Parts of all heads and sequences: blocks take every grid-th.
  static __device__ int count(const DecodeCall& c) { return c.dims.batch * c.dims.heads * c.plan.attention_splits; }
  __device__ bool has_newest() const { return old < end; }
  __device__ long whole_head(const DecodeCall& c) const { return long(sequence) * c.dims.heads + head; }
  /// In the cache (batch, heads, capacity, head_dim).
  __device__ long row(const DecodeCall& c, int key) const { return whole_head(c) * c.dims.capacity + key; }
  /// Of the ring, each with keys and then their values.
  __device__ int stages(const DecodeCall& c) const { return (old - begin + c.plan.stage_keys - 1) / c.plan.stage_keys; }
};

/// Streams the old keys and values of the block's parts; false when nobody empties the ring any more.
__device__ inline bool stream_keys(RingWriter& ring, const DecodeCall& c, int layer) {
#pragma unroll 1
  for (int item = int(blockIdx.x); item < AttentionPart::count(c); item += c.plan.grid) {
    const AttentionPart part(c, item);
#pragma unroll 1
    for (int key = part.begin; key < part.old; key += c.plan.stage_keys) {
      const int bytes = min(c.plan.stage_keys, part.old - key) * c.dims.head_dim * 2;
      const long from = part.row(c, key) * c.dims.head_dim * 2 + layer * c.layer_stride;
      char* const stage = ring.next(2 * bytes);
      if (!stage) return false;
      if (threadIdx.x % 32 == 0) {
        ring.copy(stage, c.first_layer.k_cache + from, bytes);
        ring.copy(stage + bytes, c.first_layer.v_cache + from, bytes);
      }
    }
  }
  return true;
}

/// A warp's softmax-weighted sum in progress. Scores and sums are made of whole 16 x 16 blocks of keys and elements, as many
/// as the largest head_dim that the kernel is for, which leave out what lies beyond head_dim; all
/// eight groups of four lanes hold the same weights, four keys a lane.
template <class T, int Blocks>
struct AttentionTile {
  static constexpr int kKeys = 16;
  float sum[Blocks][4] = {};  // [0] + [1]: element 16 i + lane / 4, [2] + [3]: eight further
  SoftmaxState state;         // its sum over the lane's own keys

  /// Takes 1 to 16 keys and their values. All in shared memory.
  __device__ void take(const T* query, const T* k, const T* v, int keys, int head_dim, float scale) {
    const int lane = int(threadIdx.x) % 32, t = lane % 4;
    // Lanes of keys that are not there look at the last one.
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
    SoftmaxState step;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = e / 2 * 8 + 2 * t + e % 2 < keys ? s[e] * scale : -INFINITY;
      step.max = fmaxf(step.max, s[e]);
    }
    step.max = fmaxf(step.max, __shfl_xor_sync(~0u, step.max, 1));
    step.max = fmaxf(step.max, __shfl_xor_sync(~0u, step.max, 2));
#pragma unroll
    for (int e = 0; e < 4; ++e) step.sum += s[e] = expf(s[e] - step.max);
    const SoftmaxState::Factors f = state.merge(step);
    // Even columns of the second product carry the weights rounded to T, odd ones what that leaves out.
    std::uint32_t weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T two[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float w = s[2 * h + e] * f.other;
        two[e] = from_float<T>(w);
        if (lane / 4 % 2) two[e] = from_float<T>(w - to_float(two[e]));
      }
      weight[h] = two[0].bits | std::uint32_t(two[1].bits) << 16;
    }
    if (f.mine != 1)  // the same for the whole warp
#pragma unroll
      for (int i = 0; i < Blocks; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][e] *= f.mine;
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

  /// The warp's sums, and their state in every lane.
  __device__ void put(float* values, SoftmaxState* states, int head_dim) {
    const int lane = thread_index() % 32;
    state.sum += __shfl_xor_sync(~0u, state.sum, 1);
    state.sum += __shfl_xor_sync(~0u, state.sum, 2);
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

/// q, k and v of a head's new token: awaited, rotated, rounded to T, in the block's shared memory; the part that has the
/// newest key appends k and v to the cache. A position outside the table makes what is turned NaN. False when that took
/// too long.
template <class T>
__device__ bool prepare_head(const Block& block, const AttentionPart& part, int layer) {
  const DecodeCall& c = block.c;
  const int head_dim = c.dims.head_dim, half = c.dims.half_rotary, d = block.thread();
  static_assert(kProductThreads >= kMaxDecodeHeadDim);
  const unsigned tag = block.tag(layer);
  // A thread has one element each of q, k and v, and the ones that the first two turn with.
  const bool mine = d < head_dim, turned = mine && d < 2 * half;
  const TaggedElement* const qkv = c.qkv + part.whole_head(c) * 3 * head_dim;
  const int other = d < half ? d + half : d - half;
  TaggedElement element[3] = {}, partner[2] = {};
  block.spin(layer, Dependency::qkv, [&] {
    bool here = true;
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      if (mine) element[of] = load_relaxed(qkv + of * head_dim + d);
      if (of < 2 && turned) partner[of] = load_relaxed(qkv + of * head_dim + other);
    }
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      if (mine) here = here && has_tag(element[of], tag);
      if (of < 2 && turned) here = here && has_tag(partner[of], tag);
    }
    return here;
  });
  block.sync();  // the part before is done with what lies there

  T* const fresh = block.at<T>(c.layout.fresh);
  const float* const angles = block.at<float>(c.layout.angles) + part.sequence * 2 * half + (d < half ? d : d - half);
  const long at = part.whole_head(c) * head_dim + d, row = part.row(c, part.kv_len - 1) * head_dim + d;
  if (mine)
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      T stored{std::uint16_t(element[of])};
      if (of < 2 && turned) {
        float value = to_float(stored), with = to_float(T{std::uint16_t(partner[of])});
        if (d < half)
          rotate(value, with, angles[0], angles[half]);
        else
          rotate(with, value, angles[0], angles[half]);
        stored = from_float<T>(value);
      }
      fresh[of * head_dim + d] = stored;
      if (T* const tap = static_cast<T*>(of == 0 ? c.taps.q : of == 1 ? c.taps.k : c.taps.v); tap && part.split == 0)
        tap[at] = stored;
      if (of > 0 && part.has_newest()) {
        char* const cache = (of == 1 ? c.first_layer.k_cache : c.first_layer.v_cache) + layer * c.layer_stride;
        reinterpret_cast<T*>(cache)[row] = stored;
      }
    }
  return block.sync_and_go_on();
}

/// Up to 32 partial softmax-weighted sums, merged in one order by each warp. state(i) and value(i, d) bring the i-th.
template <class State, class Value, class Store>
__device__ void merge_in_order(const Block& block, int parts, State state, Value value, Store store) {
  const int thread = block.thread(), lane = thread % 32;
  SoftmaxState mine;
  if (lane < parts) mine = state(lane);
  SoftmaxState whole{.max = mine.max, .sum = 0};
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) whole.max = fmaxf(whole.max, __shfl_xor_sync(~0u, whole.max, offset));
  const float factor = mine.max == -INFINITY ? 0.f : expf(mine.max - whole.max);
  whole.sum = warp_sum(mine.sum * factor);
#pragma unroll 1
  for (int d = thread; d - lane < block.c.dims.head_dim; d += kHelperThreads) {
    const bool there = d < block.c.dims.head_dim;
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < parts; ++i) sum += (there ? value(i, d) : 0.f) * __shfl_sync(~0u, factor, i);
    if (there) store(d, sum, whole);
  }
}

}  // namespace cf::cuda
