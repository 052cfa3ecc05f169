#pragma once
// Decode attention in parts, by a block's helpers: a block takes some of a head's keys, on tensor cores, and the last of a
// head's blocks merges what they made.
#include "cuda/device/warp.cuh"
#include "cuda/fused/block.cuh"
#include "cuda/fused/ring.cuh"

namespace cf::cuda {

/// One split of one head's keys. Old keys come from the cache; the newest is this launch's own.
struct AttentionPart {
  int sequence, head, split;
  int kv_len;      // 0 where the cache has no room for it
  int begin, end;  // keys
  int old;         // those below come from the cache

  __device__ AttentionPart(const DecodeCall& c, int item, const int* lengths) {
    split = item % c.plan.attention_splits;
    head = item / c.plan.attention_splits % c.dims.heads;
    sequence = item / c.plan.attention_splits / c.dims.heads;
    const int length = lengths[sequence];
    kv_len = length < 1 || length > c.dims.capacity ? 0 : length;
    const int keys = (kv_len + c.plan.attention_splits - 1) / c.plan.attention_splits;
    begin = min(split * keys, kv_len);
    end = min(begin + keys, kv_len);
    old = begin < end && end == kv_len ? end - 1 : end;
  }
  static __device__ int count(const DecodeCall& c) { return c.dims.batch * c.dims.heads * c.plan.attention_splits; }
  __device__ bool has_newest() const { return old < end; }
  __device__ long whole_head(const DecodeCall& c) const { return long(sequence) * c.dims.heads + head; }
  /// In the cache (batch, heads, capacity, head_dim).
  __device__ long row(const DecodeCall& c, int key) const { return whole_head(c) * c.dims.capacity + key; }
};

/// The helpers' own ring: the old keys and values of the block's parts, layer by layer, asked for as soon as there is room.
/// All helpers call; one thread copies.
class CacheRing {
 public:
  __device__ explicit CacheRing(const DecodeCall& c) : c_(c), layer_(c.first - 1), item_(AttentionPart::count(c)) {
#pragma unroll 1
    for (int s = 0; s < c_.plan.cache_stages; ++s) ask();
  }
  /// Keys of the next stage, their values behind them.
  __device__ const char* wait() const {
    wait_barrier(barrier(place_.stage), int(place_.parity));
    return stage(place_.stage);
  }
  /// All helpers are done with the stage.
  __device__ void release() {
    named_barrier(Block::kHelperBarrier, kHelperThreads);
    place_.advance(c_.plan.cache_stages);
    --asked_;
    ask();
  }
  /// Shared memory must not be given back while copies are on their way.
  __device__ void drain() {
    for (; asked_ > 0; --asked_) {
      wait();
      place_.advance(c_.plan.cache_stages);
    }
  }

 private:
  __device__ std::uint64_t* barrier(int s) const {
    return reinterpret_cast<std::uint64_t*>(decode_smem + c_.layout.barriers) + 2 * c_.plan.stages + s;
  }
  __device__ char* stage(int s) const {
    return decode_smem + c_.layout.cache + s * c_.plan.cache_keys * c_.dims.head_dim * 4;
  }
  /// Asks for the next keys of the walk over layers, parts and keys, if there are any.
  __device__ void ask() {
    while (left_ <= 0) {
      item_ += c_.plan.grid;
      if (item_ >= AttentionPart::count(c_)) {
        if (layer_ + 1 >= c_.last || int(blockIdx.x) >= AttentionPart::count(c_)) return;
        ++layer_;
        item_ = int(blockIdx.x);
      }
      const AttentionPart part(c_, item_, reinterpret_cast<const int*>(decode_smem + c_.layout.lengths));
      left_ = part.old - part.begin;
      from_ = part.row(c_, part.begin) * c_.dims.head_dim * 2 + layer_ * c_.layer_stride;
    }
    const int keys = min(c_.plan.cache_keys, left_), bytes = keys * c_.dims.head_dim * 2;
    if (threadIdx.x == kProductThreads) {
      arrive_expecting(barrier(ahead_.stage), 2 * bytes);
      char* const to = stage(ahead_.stage);
      copy_bulk(to, c_.first_layer.k_cache + from_, bytes, barrier(ahead_.stage));
      copy_bulk(to + bytes, c_.first_layer.v_cache + from_, bytes, barrier(ahead_.stage));
      // The ring is short: keys further on come as far as the L2.
      const int further = c_.plan.cache_prefetch * c_.plan.cache_keys;
      if (const int later = min(c_.plan.cache_keys, left_ - further); further > 0 && later > 0) {
        const long offset = from_ + long(further) * c_.dims.head_dim * 2;
        prefetch_bulk(c_.first_layer.k_cache + offset, later * c_.dims.head_dim * 2);
        prefetch_bulk(c_.first_layer.v_cache + offset, later * c_.dims.head_dim * 2);
      }
    }
    ahead_.advance(c_.plan.cache_stages);
    left_ -= keys;
    from_ += bytes;
    ++asked_;
  }

  const DecodeCall& c_;
  RingPlace place_, ahead_;
  int asked_ = 0;
  int layer_, item_, left_ = 0;  // what is asked for next, and keys that are left of it
  long from_ = 0;                // bytes from the first layer's cache
};

/// A warp's softmax-weighted sum in progress. Scores and sums are made of whole 16 x 16 blocks of keys and elements; all
/// eight groups of four lanes hold the same weights, four keys a lane.
template <class T>
struct AttentionTile {
  static constexpr int kKeys = 16, kBlocks = 256 / 16;
  float sum[kBlocks][4] = {};  // [0] + [1]: element 16 i + lane / 4, [2] + [3]: eight further
  SoftmaxState state;          // its sum over the lane's own keys

  /// Takes 1 to 16 keys and their values. All in shared memory.
  __device__ void take(const T* query, const T* k, const T* v, int keys, int head_dim, float scale) {
    const int lane = int(threadIdx.x) % 32, t = lane % 4;
    // Lanes of keys that are not there look at the last one.
    const T* const key = k + min(lane / 16 * 8 + lane % 8, keys - 1) * head_dim + lane / 8 % 2 * 8;
    const std::uint32_t* const pairs = reinterpret_cast<const std::uint32_t*>(query) + t;
    float score[2][4] = {};
#pragma unroll 4
    for (int i = 0; i < (head_dim + 15) / 16; ++i) {
      const bool half = i * 16 + 8 >= head_dim;
      uint4 m = load_matrices(shared_address(key) + 2 * (half && lane / 8 % 2 ? i * 16 - 8 : i * 16));
      if (half) m.y = m.w = 0;
      const std::uint32_t q_low = pairs[i * 8], q_high = half ? 0 : pairs[i * 8 + 4];
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
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][e] *= f.mine;
    const auto there = [&](int first) { return (first < keys ? 0xffffu : 0) | (first + 1 < keys ? 0xffff0000u : 0); };
    const std::uint32_t low = there(2 * t), high = there(2 * t + 8);
    const T* const value = v + min(lane / 16 * 8 + lane % 8, keys - 1) * head_dim + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i * 16 >= head_dim) continue;
      const bool half = i * 16 + 8 >= head_dim;
      const uint4 m =
          load_matrices_transposed(shared_address(value) + 2 * (half && lane / 8 % 2 ? i * 16 - 8 : i * 16));
      mma(sum[i], m.x & low, m.y & low, m.z & high, m.w & high, weight[0], weight[1], T{});
    }
  }

  /// The warp's sums, and their state in every lane.
  __device__ void put(float* values, SoftmaxState* states, int head_dim) {
    const int thread = int(threadIdx.x), lane = thread % 32;
    state.sum += __shfl_xor_sync(~0u, state.sum, 1);
    state.sum += __shfl_xor_sync(~0u, state.sum, 2);
    if (lane == 0) *states = state;
    if (lane % 4) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      if (i * 16 < head_dim) {
        values[i * 16 + lane / 4] = sum[i][0] + sum[i][1];
        if (i * 16 + 8 < head_dim) values[i * 16 + 8 + lane / 4] = sum[i][2] + sum[i][3];
      }
  }
};

/// q, k and v of a head's new token: rotated, rounded to T, in the block's shared memory; the part that has the newest key
/// appends k and v to the cache. A position outside the table makes what is turned NaN.
template <class T>
__device__ void prepare_head(const Block& block, const AttentionPart& part, char* k_cache, char* v_cache) {
  const DecodeCall& c = block.c;
  const int head_dim = c.dims.head_dim, half = c.dims.half_rotary;
  const float* const angles = block.at<float>(c.layout.angles) + part.sequence * 2 * half;
  const T* const qkv = static_cast<const T*>(c.qkv) + part.whole_head(c) * 3 * head_dim;
  T* const fresh = block.at<T>(c.layout.fresh);
  const auto element = [&](int i) { return to_float(T{load_shared_work(&qkv[i].bits)}); };
  const auto turned = [&](int i) { return i < 2 * head_dim && i % head_dim < 2 * half; };
  constexpr int at_once = 3;  // elements a thread, whose loads are in flight together
#pragma unroll 1
  for (int begin = block.thread(); begin < 3 * head_dim; begin += at_once * kHelperThreads) {
    float value[at_once] = {}, other[at_once] = {};
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      if (const int i = begin + u * kHelperThreads; i < 3 * head_dim) {
        value[u] = element(i);
        if (turned(i)) other[u] = element(i % head_dim < half ? i + half : i - half);
      }
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      const int i = begin + u * kHelperThreads, of = i / head_dim, d = i % head_dim;
      if (of > 2) break;
      if (turned(i)) {
        const float cos = angles[d % half], sin = angles[half + d % half];
        if (d < half)
          rotate(value[u], other[u], cos, sin);
        else
          rotate(other[u], value[u], cos, sin);
      }
      const T stored = from_float<T>(value[u]);
      fresh[i] = stored;
      if (T* const tap = static_cast<T*>(of == 0 ? c.taps.q : of == 1 ? c.taps.k : c.taps.v); tap && part.split == 0)
        tap[part.whole_head(c) * head_dim + d] = stored;
      if (of > 0 && part.has_newest()) {
        T* const cache = reinterpret_cast<T*>(of == 1 ? k_cache : v_cache);
        cache[part.row(c, part.kv_len - 1) * head_dim + d] = stored;
      }
    }
  }
}

/// Up to 32 partial softmax-weighted sums, merged in one order by each warp. state(i) and value(i, d) bring the i-th.
template <class State, class Value, class Store>
__device__ void merge_parts(const Block& block, int parts, State state, Value value, Store store) {
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
