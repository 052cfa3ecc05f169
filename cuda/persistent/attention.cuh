#pragma once
// Decode attention over key splits. The consumer warps of a block attend to the keys of a split on tensor cores, with
// all query heads of a GQA tile at once; its auxiliary warps merge the warps' partial results. The auxiliary warps of a
// GQA tile's splits then merge the splits' partial results, each those of its own heads of the GQA tile.
#include "cuda/device/softmax.cuh"
#include "cuda/persistent/block.cuh"
#include "cuda/persistent/ring.cuh"

namespace cf::cuda {

/// The query heads of a GQA tile. `Grouped` says whether that is more than one: it is known when a kernel is compiled.
template <bool Grouped>
__device__ int gqa_heads(const PersistentArguments& c) {
  if constexpr (!Grouped) return 1;
  int heads = c.plan.gqa_heads;
  make_anew(heads);  // no register holds it, or what is computed from it, from layer to layer
  return heads;
}

/// Entries of a head that lie one behind the other in the cache.
struct KeyRows {
  int first = 0, count = 0;
  long at = 0;  // the first element of the first one
};

/// One split of the keys that a GQA tile of a sequence's query heads attends to. The cached keys come through the ring;
/// the newest key is made by this launch. Key split i belongs to block i % grid.
struct KeySplit {
  int sequence, gqa_tile, split;
  int splits;         // of the GQA tile's keys; this one has keys if `split` is below
  int kv_head;        // whose keys and values these are
  int kv_len;         // 0 where the sequence is idle, or where it is beyond the capacity
  int begin, end;     // keys
  int end_of_cached;  // keys [begin, end_of_cached) come from the cache

  /// `token` counts the launch's tokens: each has one key more than the one before.
  __device__ KeySplit(const PersistentArguments& c, int item, int token) {
    const Divisors& by = c.plan.divisors;
    const int of_all = by.attention_splits.quotient(item);  // the GQA tile's number among those of all sequences
    split = item - of_all * c.plan.attention_splits;
    sequence = by.gqa_tiles.quotient(of_all);
    gqa_tile = of_all - sequence * c.plan.gqa_tiles;
    kv_head = by.group_gqa_tiles.quotient(gqa_tile);
    const int first = reinterpret_cast<const int*>(block_smem + c.layout.lengths)[sequence], length = first + token;
    kv_len = first < 1 || length > c.capacity ? 0 : length;
    splits = min(max((kv_len + kSplitKeys - 1) / kSplitKeys, 1), c.plan.attention_splits);
    // Whole tiles of keys: a split's copies then begin at a line of memory, as its head's entries do.
    const int each = int((unsigned(kv_len) + unsigned(splits) - 1) / unsigned(splits)),
              keys = (each + kTileKeys - 1) / kTileKeys * kTileKeys;
    begin = min(split * keys, kv_len);
    end = min(begin + keys, kv_len);
    end_of_cached = begin < end && end == kv_len ? end - 1 : end;
  }
  /// Key splits of all GQA tiles and sequences, those without keys too.
  static __device__ int count(const PersistentArguments& c) {
    return c.dims.batch * c.plan.gqa_tiles * c.plan.attention_splits;
  }
  __device__ bool is_used() const { return split < splits; }
  __device__ bool has_newest() const { return end_of_cached < end; }
  /// The number of the GQA tile's first head among the query heads of all sequences.
  template <bool Grouped>
  __device__ long batch_head(const PersistentArguments& c) const {
    return (long(sequence) * c.plan.gqa_tiles + gqa_tile) * gqa_heads<Grouped>(c);
  }
  /// The kv head's number among those of all sequences.
  __device__ long batch_kv_head(const PersistentArguments& c) const {
    return long(sequence) * c.dims.kv_heads + kv_head;
  }
  /// Whether the GQA tile is the first of its group: that one stores k and v. Most groups are one GQA tile.
  __device__ bool leads_group(const PersistentArguments& c) const {
    return kv_head * c.plan.group_gqa_tiles == gqa_tile;
  }
  /// Those of keys [first, end) that lie in the `nth` page which has any of them.
  __device__ KeyRows rows(const PersistentArguments& c, int first, int end, int nth) const {
    const PersistentPages& pages = c.pages;
    const CacheView cache(c.dims.kv_heads, pages.entries, c.dims.head_dim);
    if (!pages.table) return {first, nth == 0 ? end - first : 0, cache.entry(sequence, kv_head, first)};
    const int number = pages.by_entries.quotient(first) + nth, begin = number * pages.entries;
    first = max(first, begin), end = min(end, begin + pages.entries);
    if (first >= end) return {};
    return {first, end - first,
            cache.entry(pages.table[sequence * pages.of_sequence + number], kv_head, first - begin)};
  }
  /// The first element of the newest key's entry in the cache.
  __device__ long newest_entry(const PersistentArguments& c) const {
    const PersistentPages& pages = c.pages;
    const int page = reinterpret_cast<const int*>(block_smem + c.layout.newest_pages)[sequence], key = kv_len - 1;
    return CacheView(c.dims.kv_heads, pages.entries, c.dims.head_dim)
        .entry(page, kv_head, key - pages.by_entries.quotient(key) * pages.entries);
  }
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
      const int keys = min(c.plan.stage_keys, split.end_of_cached - key), entry_bytes = c.dims.head_dim * 2;
      // Lane i copies what lies in the i-th page of the stage.
      const KeyRows rows = split.rows(c, key, key + keys, int(threadIdx.x) % 32);
      if (!ring.next()) return false;
      ring.expect(2 * keys * entry_bytes);
      if (rows.count > 0) {
        const int to = (rows.first - key) * entry_bytes, bytes = rows.count * entry_bytes;
        ring.copy(to, k_cache + rows.at * 2, bytes);
        ring.copy(keys * entry_bytes + to, v_cache + rows.at * 2, bytes);
      }
    }
  }
  return true;
}

/// In heads of a multiple of so many elements all keys begin in the same bank.
inline constexpr int kTurnedElements = 64;
/// Exchanges the chunks of a tile's rows in shared memory: chunk c of row i goes to the place of chunk c ^ i % 8. All
/// lanes call.
template <class T>
__device__ void turn_chunks(int lane, const T* rows, int count, int head_dim) {
  constexpr int at_once = 2;  // of a lane: a batch has whole rows, and registers hold no more
  uint4* const chunks = reinterpret_cast<uint4*>(const_cast<T*>(rows));
  const int of_row = head_dim / kVec, end = count * of_row;
#pragma unroll 1
  for (int first = lane; first - lane < end; first += 32 * at_once) {
    uint4 batch[at_once];
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      if (const int i = first + 32 * u; i < end) batch[u] = chunks[i];
    __syncwarp();
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      if (const int i = first + 32 * u; i < end)
        chunks[i ^ (head_dim == kTurnedElements ? i / 8 : i / 16) % 8] = batch[u];
  }
  __syncwarp();
}

/// A warp's softmax-weighted sums in progress. Scores and sums are made of 16 x 16 blocks of keys and elements:
/// `Blocks` blocks hold the largest head_dim of the instantiation, and what lies beyond head_dim is left out. Below
/// g = lane / 4 and t = lane % 4.
///
/// The first product, Q K^T, makes scores: its rows are queries and its columns keys. The second product, V^T P^T,
/// makes sums: its rows are elements of a value and its columns queries. After the first product a lane holds the
/// scores of row g for keys 2t, 2t + 1, 2t + 8 and 2t + 9. For the second product it needs the weights of column g for
/// the same keys. So each weight is computed in the lane that needs it. Rows 8 to 15 of Q repeat rows 0 to 7, and their
/// scores are not used.
///
/// A weight is the sum of two elements of T: the weight rounded to T, and the remainder. Without Grouped all rows of Q
/// are the one query. Even columns of the second product are then the rounded weights, odd columns the remainders. With
/// Grouped row g and column g are query g of the GQA tile. Rows and columns beyond the GQA tile's queries repeat its
/// last query. A third product adds the remainders.
///
/// With head_dim 64 or 128 the same chunk, eight elements, of all keys lies in the same banks of shared memory: one load
/// of it for eight keys takes eight times as long. With Grouped the warp therefore exchanges the chunks of each key and
/// value first: chunk c of row i goes to the place of chunk c ^ i % 8.
template <class T, int Blocks, bool Grouped>
struct AttentionTile {
  static constexpr int kKeys = kTileKeys;
  /// Whether four warps take the tiles of all stages in turn. Then all four have work where a stage has fewer than four
  /// tiles. Here every stage begins with the first warp: the turn would take registers that the kernel lacks.
  static constexpr bool kInTurn = false;
  // Of a lone head [i][0] + [i][1] is element 16 i + g, [i][2] + [i][3] the one 8 further. With Grouped [i][0] and
  // [i][2] are the two elements of query 2t, [i][1] and [i][3] those of query 2t + 1.
  float sum[Blocks][4] = {};
  SoftmaxState state;  // of the lane's query; its sum is over the lane's own keys

  /// Adds 1 to 16 keys and their values. All lie in shared memory, as does the query of row g.
  __device__ void add(int lane, const T* query, const T* k, const T* v, int keys, int head_dim, float scale) {
    const int t = lane % 4, odd = lane / 8 % 2;
    const int row = min(lane / 16 * 8 + lane % 8, keys - 1);  // lanes beyond the last key load the last key
    int turn = 0;                                             // of the lane's row
    if constexpr (Grouped)
      if (head_dim % kTurnedElements == 0) {
        turn = row % 8;
        if (keys > 1) turn_chunks(lane, k, keys, head_dim), turn_chunks(lane, v, keys, head_dim);
      }
    // Chunk 2i or 2i + 1 of the lane's row, whichever it loads.
    const auto chunk_at = [&](const T* first, int i, bool none, bool half) {
      const std::uint32_t begin = shared_address(first + row * head_dim + (Grouped ? 0 : odd * kVec));
      if constexpr (Grouped) return begin + 2 * kVec * unsigned((none ? 0 : 2 * i) ^ (half ? turn : odd ^ turn));
      return begin + 2 * (none ? 0 : half && odd ? i * 16 - kVec : i * 16);
    };
    const std::uint32_t* const pairs = reinterpret_cast<const std::uint32_t*>(query) + t;
    float score[2][4] = {};
#pragma unroll(Blocks > 8 ? 4 : Blocks)  // registers hold no more
    for (int i = 0; i < Blocks; ++i) {
      const bool none = i * 16 >= head_dim, half = i * 16 + 8 >= head_dim;
      uint4 m = load_matrices(chunk_at(k, i, none, half));
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
          // The factors of columns 2t and 2t + 1: with Grouped the first lanes of groups 2t and 2t + 1 have them.
          float of_column[2] = {factor, factor};
          if constexpr (Grouped)
            of_column[0] = __shfl_sync(~0u, factor, 8 * t), of_column[1] = __shfl_sync(~0u, factor, 8 * t + 4);
#pragma unroll
          for (int i = 0; i < Blocks; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][e] *= of_column[e % 2];
        });
    // The columns of the second product; with Grouped the remainders are columns of a product of their own.
    std::uint32_t weight[2], remainder[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T two[2], rest[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float w = s[2 * h + e];
        two[e] = from_float<T>(w);
        if constexpr (Grouped)
          rest[e] = from_float<T>(w - to_float(two[e]));
        else if (lane / 4 % 2)
          two[e] = from_float<T>(w - to_float(two[e]));
      }
      weight[h] = two[0].bits | std::uint32_t(two[1].bits) << 16;
      if constexpr (Grouped) remainder[h] = rest[0].bits | std::uint32_t(rest[1].bits) << 16;
    }
    const auto there = [&](int first) { return (first < keys ? 0xffffu : 0) | (first + 1 < keys ? 0xffff0000u : 0); };
    const std::uint32_t low = there(2 * t), high = there(2 * t + 8);
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
      const bool none = i * 16 >= head_dim, half = i * 16 + 8 >= head_dim;
      const uint4 m = load_matrices_transposed(chunk_at(v, i, none, half));
      const std::uint32_t a[4] = {m.x & low, m.y & low, m.z & high, m.w & high};
      mma(sum[i], a[0], a[1], a[2], a[3], weight[0], weight[1], T{});
      if constexpr (Grouped) mma(sum[i], a[0], a[1], a[2], a[3], remainder[0], remainder[1], T{});
    }
    if constexpr (Grouped) let_copies_overwrite();
  }

  /// Stores the warp's sums and their states, of `heads` queries, in shared memory.
  __device__ void store(float* values, SoftmaxState* states, int head_dim, int heads) {
    const int lane = thread_index() % 32;
    state.sum = quad_sum(state.sum);
    const auto store_query = [&](float* to, auto low, auto high) {
#pragma unroll
      for (int i = 0; i < Blocks; ++i)
        if (i * 16 < head_dim) {
          to[i * 16 + lane / 4] = low(sum[i]);
          if (i * 16 + 8 < head_dim) to[i * 16 + 8 + lane / 4] = high(sum[i]);
        }
    };
    if constexpr (Grouped) {
      if (lane % 4 == 0 && lane / 4 < heads) states[lane / 4] = state;
      const int query = lane % 4 * 2, stride = values_stride(head_dim, heads);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (query + e < heads)
          store_query(
              values + (query + e) * stride, [&](const float* s) { return s[e]; },
              [&](const float* s) { return s[2 + e]; });
    } else {
      if (lane == 0) *states = state;
      if (lane % 4) return;
      store_query(
          values, [](const float* s) { return s[0] + s[1]; }, [](const float* s) { return s[2] + s[3]; });
    }
  }
};

/// AttentionTile for one query head of 64 or 128 elements; the results are the same to rounding. Below g = lane / 4 and
/// t = lane % 4. In shared memory the keys of such heads begin a multiple of 128 bytes apart. The same eight elements
/// of eight keys then lie in the same banks, and one load of them takes eight times as long. So this tile loads eight
/// keys along a diagonal: load n brings chunk n + i of the i-th key. A chunk is eight elements. Behind a key's last
/// chunk comes its first again. For a value the same holds within each half of 64 elements.
///
/// First product, Q K^T: row i of Q holds the query's chunks from chunk i on. So element [i][i] is the score of key i.
/// The other elements are not used.
/// Second product, V^T P^T: column j of P^T takes the weights of those keys whose chunk j was loaded, and zeros for the
/// others. So column j of the sums is chunk j. Rows 0 to 7 are the eight elements of chunk j, rows 8 to 15 those of
/// chunk j + 8. A third product adds the remainders of the weights.
/// Where element e of some chunk of a value is not finite, element e of all its half's chunks becomes NaN.
template <class T>
struct DiagonalTile {
  static constexpr int kKeys = kTileKeys;
  static constexpr bool kInTurn = true;
  // The sums of even and of odd loads. [0] and [1] are element g of chunks 2t and 2t + 1, [2] and [3] the elements 64
  // further.
  float sum[2][4] = {};
  SoftmaxState state;  // its sum is over the lane's own keys

  /// As AttentionTile::add().
  __device__ void add(int lane, const T* query, const T* k, const T* v, int keys, int head_dim, float scale) {
    const int g = lane / 4, t = lane % 4, row = lane % 8;
    const int from_key = min(lane / 16 * 8 + row, keys - 1) * head_dim;  // lanes beyond the last key load the last key
    const int last_chunk = head_dim / kVec - 1;
    const std::uint32_t* const pairs = reinterpret_cast<const std::uint32_t*>(query) + t;
    float score[2][4] = {};
#pragma unroll
    for (int n = 0; n < kMaxChunks; n += 2) {
      if (n > last_chunk) break;
      const uint4 m = load_matrices(shared_address(k + from_key + (n + lane / 8 % 2 + row & last_chunk) * kVec));
      const std::uint32_t low = pairs[(n + g & last_chunk) * 4], high = pairs[(n + 1 + g & last_chunk) * 4];
      mma(score[0], low, low, high, high, m.x, m.y, T{});
      mma(score[1], low, low, high, high, m.z, m.w, T{});
    }
    // The score of key i is in lane 4i + i / 2. Lane (g, t) takes those of keys 2t, 2t + 1, 2t + 8 and 2t + 9.
    float s[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = __shfl_sync(~0u, score[e / 2][e % 2], 9 * t + 4 * (e % 2));
      if (e / 2 * 8 + 2 * t + e % 2 >= keys) s[e] = -INFINITY;
    }
    weigh<4, false>(
        state, scale, [&](int e) -> float& { return s[e]; },
        [&](float factor) {
#pragma unroll
          for (auto& sums : sum)
#pragma unroll
            for (float& of : sums) of *= factor;
        });
    std::uint32_t weight[2], remainder[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weight[h] = pack_pair<T>(s[2 * h], s[2 * h + 1]);
      const float2 rounded = unpack(weight[h], T{});
      remainder[h] = pack_pair<T>(s[2 * h] - rounded.x, s[2 * h + 1] - rounded.y);
    }
    // Load `first` brings chunk g of keys 2t and 2t + 8, load `second` that of keys 2t + 1 and 2t + 9.
    const int first = g - 2 * t & 7, second = first - 1 & 7, half = lane / 8 % 2 * (last_chunk & 8);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint4 m = load_matrices_transposed(shared_address(v + from_key + ((n + row & 7) + half) * kVec));
      const std::uint32_t of_column = n == first ? 0xffffu : n == second ? 0xffff0000u : 0;
      mma(sum[n % 2], m.x, m.y, m.z, m.w, weight[0] & of_column, weight[1] & of_column, T{});
      mma(sum[n % 2], m.x, m.y, m.z, m.w, remainder[0] & of_column, remainder[1] & of_column, T{});
    }
  }

  /// Stores the warp's sums and their state in shared memory.
  __device__ void store(float* values, SoftmaxState* states, int head_dim, int /*heads*/) {
    const int lane = thread_index() % 32, at = lane % 4 * 2 * kVec + lane / 4;
    state.sum = quad_sum(state.sum);
    if (lane == 0) *states = state;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < 2 || head_dim > 64) values[at + e / 2 * 64 + e % 2 * kVec] = sum[0][e] + sum[1][e];
  }

 private:
  static constexpr int kMaxChunks = 16;  // of eight elements
};

/// RMSNorm of one head's elements: x * rstd * gamma, rounded to T.
template <class T>
__device__ T normed(T x, float rstd, T gamma) {
  return from_float<T>(to_float(x) * rstd * to_float(gamma));
}
/// The reciprocal root of the mean square of a head.
__device__ inline float head_rstd(const PersistentArguments& c, float squares) {
  return rsqrtf(__fdividef(squares, float(c.dims.head_dim)) + c.eps);
}

/// Waits for q, k and v of a head's new token, with Norms normalises q and k, rotates them by RoPE, rounds them to T and
/// stores all three in the block's shared memory. The block of the split with the newest key appends k and v to the
/// cache: of GQA tiles that have the same, that of the first GQA tile. A position outside the RoPE table makes the
/// rotated elements NaN. False where the wait took too long.
template <class T, bool Norms>
__device__ bool prepare_head(const Block& block, const KeySplit& split, int layer) {
  const PersistentArguments& c = block.c;
  const int head_dim = c.dims.head_dim, half = c.dims.half_rotary, d = block.thread();
  static_assert(kConsumerThreads >= kMaxPersistentHeadDim);
  const unsigned epoch = block.epoch(layer);
  // A thread has one element each of q, k and v, and the partners that RoPE rotates those of q and k with.
  const bool has_element = d < head_dim, rotated = has_element && d < 2 * half;
  const QkvOffsets& at = c.dims.qkv_offsets;
  const ElementWord* const qkv = c.exchange.qkv + long(split.sequence) * c.dims.qkv_rows;
  const ElementWord* const of_head[3] = {qkv + split.gqa_tile * at.q_step,
                                         qkv + at.k_first + split.kv_head * at.kv_step,
                                         qkv + at.v_first + split.kv_head * at.kv_step};
  const int other = d < half ? d + half : d - half;
  T gamma[2] = {}, partner_gamma[2] = {};  // of q and of k
  if constexpr (Norms)
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const T* const weights = reinterpret_cast<const T*>(block.pointers(layer).weights.head_gamma[of]);
      if (has_element) gamma[of] = weights[d];
      if (rotated) partner_gamma[of] = weights[other];
    }
  ElementWord element[3] = {}, partner[2] = {};
  block.poll(layer, Dependency::qkv, [&] {
    bool here = true;
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      if (has_element) element[of] = load_relaxed(of_head[of] + d);
      if (of < 2 && rotated) partner[of] = load_relaxed(of_head[of] + other);
    }
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      if (has_element) here = here && has_epoch(element[of], epoch);
      if (of < 2 && rotated) here = here && has_epoch(partner[of], epoch);
    }
    return here;
  });
  float2* const squares = block.at<float2>(c.layout.moments);  // of each warp's elements of q and of k
  if constexpr (Norms) {
    const auto square = [&](int of) {
      const float x = to_float(T{std::uint16_t(element[of])});
      return warp_sum(x * x);
    };
    const float2 sums{square(0), square(1)};
    if (d % 32 == 0) squares[d / 32] = sums;
  }
  block.sync();  // all warps have read the new token of the split before
  float rstd[2] = {};
  if constexpr (Norms) {
    const float2 of_warp = squares[d % kConsumerWarps];
    rstd[0] = head_rstd(c, warp_sum<kConsumerWarps>(of_warp.x));
    rstd[1] = head_rstd(c, warp_sum<kConsumerWarps>(of_warp.y));
  }

  T* const new_token = block.at<T>(c.layout.new_token);
  const float* const angles = block.at<float>(c.layout.angles) + split.sequence * 2 * half + (d < half ? d : d - half);
  const bool leads_group = split.leads_group(c);
  const long q_at = split.batch_head<false>(c) * head_dim + d, kv_at = split.batch_kv_head(c) * head_dim + d,
             row = split.newest_entry(c) + d;
  if (has_element)
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      T stored{std::uint16_t(element[of])}, with{std::uint16_t(of < 2 ? partner[of] : 0)};
      if (Norms && of < 2) {
        stored = normed(stored, rstd[of], gamma[of]);
        with = normed(with, rstd[of], partner_gamma[of]);
      }
      if (Norms && c.taps.qkv_normed && split.split == 0 && (of == 0 || leads_group)) [[unlikely]]
        static_cast<T*>(c.taps.qkv_normed)[of_head[of] - c.exchange.qkv + d] = stored;
      if (of < 2 && rotated) {
        float value = to_float(stored), other_value = to_float(with);
        if (d < half)
          rotate(value, other_value, angles[0], angles[half]);
        else
          rotate(other_value, value, angles[0], angles[half]);
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

/// prepare_head() for a GQA tile of several query heads, which have one k and one v. Each half of a warp takes one row:
/// a query, k or v. The half stores its row in shared memory, with Norms a query or k normalised, rotates a query or k
/// there, and appends k or v to the cache.
template <class T, bool Norms>
__device__ bool prepare_tile(const Block& block, const KeySplit& split, int layer) {
  constexpr int lanes = 16, at_once = kMaxGqaHeadDim / (4 * lanes);
  static_assert((kMaxGqaHeads + 2) * lanes <= kConsumerThreads);
  const PersistentArguments& c = block.c;
  const int head_dim = c.dims.head_dim, half = c.dims.half_rotary, heads = gqa_heads<true>(c);
  const int row = block.thread() / lanes, lane = block.thread() % lanes, stride = query_stride(head_dim, heads);
  const bool is_query = row < heads, is_key = row == heads, is_value = row == heads + 1;
  const bool has_row = is_query || is_key || is_value;
  const QkvOffsets& at = c.dims.qkv_offsets;
  const ElementWord* const from = c.exchange.qkv + long(split.sequence) * c.dims.qkv_rows +
                                  (is_query ? (split.gqa_tile * heads + row) * at.q_step
                                            : (is_key ? at.k_first : at.v_first) + split.kv_head * at.kv_step);
  const unsigned epoch = block.epoch(layer);
  const auto column = [&](int u) { return (u * lanes + lane) * 4; };
  const auto in_row = [&](int u) { return has_row && column(u) < head_dim; };
  uint2 gamma[at_once] = {};
  if constexpr (Norms) {
    const T* const weights = reinterpret_cast<const T*>(block.pointers(layer).weights.head_gamma[is_query ? 0 : 1]);
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      if (in_row(u)) gamma[u] = *reinterpret_cast<const uint2*>(weights + column(u));
  }
  uint4 four[at_once] = {};
  const auto load = [&](int u) {
    if (in_row(u)) four[u] = load_relaxed_quad(from + column(u));
  };
  await_pieces<at_once>(block, layer, Dependency::qkv, load,
                        [&](int u) { return !in_row(u) || have_epoch(four[u], epoch); });
  block.sync();  // all warps have read the new token of the split before

  T* const to = block.at<T>(c.layout.new_token) + (is_query ? row * stride : heads * stride + is_value * head_dim);
  const auto pair = [](unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); };
  if constexpr (Norms) {
    const auto element = [](unsigned word) { return T{std::uint16_t(word)}; };
    float squares = 0;
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      for (const unsigned word : {four[u].x, four[u].y, four[u].z, four[u].w})
        squares += to_float(element(word)) * to_float(element(word));
    const float rstd = head_rstd(c, warp_sum<lanes>(squares));
    const auto normalise = [&](unsigned& word, unsigned weight) {
      word = normed(element(word), rstd, element(weight)).bits;
    };
    if (!is_value)
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
        normalise(four[u].x, gamma[u].x), normalise(four[u].y, gamma[u].x >> 16);
        normalise(four[u].z, gamma[u].y), normalise(four[u].w, gamma[u].y >> 16);
      }
  }
#pragma unroll
  for (int u = 0; u < at_once; ++u)
    if (in_row(u)) *reinterpret_cast<uint2*>(to + column(u)) = {pair(four[u].x, four[u].y), pair(four[u].z, four[u].w)};
  __syncwarp();
  const bool stores_taps = has_row && split.split == 0 && (is_query || split.leads_group(c));
  if (T* const tap = static_cast<T*>(c.taps.qkv_normed); Norms && tap && stores_taps) [[unlikely]] {
#pragma unroll 1
    for (int d = lane; d < head_dim; d += lanes) tap[from - c.exchange.qkv + d] = to[d];
  }
  __syncwarp();
  if (is_query || is_key) {
    const float* const angles = block.at<float>(c.layout.angles) + split.sequence * 2 * half;
#pragma unroll 4
    for (int d = lane; d < half; d += lanes) {
      float a = to_float(to[d]), b = to_float(to[d + half]);
      rotate(a, b, angles[d], angles[half + d]);
      to[d] = from_float<T>(a), to[d + half] = from_float<T>(b);
    }
  }
  __syncwarp();
  if ((is_key || is_value) && split.has_newest() && split.leads_group(c)) {
    const CachePointers& cache = block.pointers(layer).cache;
    T* const entry = reinterpret_cast<T*>(is_key ? cache.k : cache.v) + split.newest_entry(c);
#pragma unroll 1
    for (int d = lane * kVec; d < head_dim; d += lanes * kVec)
      __stcg(reinterpret_cast<uint4*>(entry + d), *reinterpret_cast<const uint4*>(to + d));
  }
  if (T* const tap = static_cast<T*>(is_query ? c.taps.q : is_key ? c.taps.k : c.taps.v); tap && stores_taps) {
    const long to_at = (is_query ? split.batch_head<true>(c) + row : split.batch_kv_head(c)) * head_dim;
#pragma unroll 1
    for (int d = lane; d < head_dim; d += lanes) tap[to_at + d] = to[d];
  }
  return block.sync_unless_stopped();
}

/// The elements of a head that a thread merges: `first`, then every one that lies a multiple of `step` further.
struct MergedElements {
  int first, step;
};

/// Merges partial results of attention in a fixed order. `count` is their number, 1 to 32. Each calling warp merges the
/// elements that `elements` gives its threads. state(i) is the softmax state of partial result i, and value(i, d) its
/// weighted value d. store(d, sum, state) takes the sum of element d and the state of all partial results.
template <class State, class Value, class Store>
__device__ void merge_partials(const Block& block, int count, MergedElements elements, State state, Value value,
                               Store store) {
  const int lane = block.thread() % 32;
  SoftmaxState own;
  if (lane < count) own = state(lane);
  SoftmaxState whole{.max = own.max, .sum = 0};
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) whole.max = fmaxf(whole.max, __shfl_xor_sync(~0u, whole.max, offset));
  const float factor = own.factor(whole.max);  // 0 for an empty state, that of a split without keys too
  whole.sum = warp_sum(own.sum * factor);
#pragma unroll 1
  for (int d = elements.first; d - lane < block.c.dims.head_dim; d += elements.step) {
    const bool has_element = d < block.c.dims.head_dim;
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < count; ++i) sum += (has_element ? value(i, d) : 0.f) * __shfl_sync(~0u, factor, i);
    if (has_element) store(d, sum, whole);
  }
}

}  // namespace cf::cuda
