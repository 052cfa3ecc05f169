#pragma once
// What the attention kernels share: a warp's attention over a tile of keys on tensor cores, and the merge of partial
// results. cuda/persistent/attention.cuh has tiles of its own: their keys lie in the ring as they lie in the cache, and
// a warp's one query takes 16 of them at a time. All tiles make their weights by weigh() of cuda/device/softmax.cuh.
#include <type_traits>

#include "core/cache_view.hpp"
#include "cuda/device/address.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {

/// The arguments of an attention kernel, as ops::Attention::Args has them.
struct AttentionCall {
  const void *q, *k_cache, *v_cache;
  const std::int32_t* kv_len;
  void* y;
  float scale;
  int q_len, heads, head_dim;
  HeadGroup group;
  CacheView cache;

  /// How many keys query i of a sequence with n valid entries sees. Without any its result is NaN.
  __device__ int visible_keys(int n, int i) const { return cache.visible_entries(n, q_len, i); }
  /// The first element of a query, in q and in y.
  __device__ long query(int b, int i, int head) const { return ((long(b) * q_len + i) * heads + head) * head_dim; }
  /// The kv head that a query head reads.
  __device__ int kv_head(int head) const { return group.quotient(head); }
  /// The rows of a kv head: the queries of its group's heads. Row r is query query_of(r) of head r % group.
  __host__ __device__ int rows() const { return q_len * group.size(); }
  __device__ int query_of(int row) const { return group.quotient(row); }
  /// The first element of a row, in q and in y.
  __device__ long row(int b, int kv_head, int r) const {
    const int i = query_of(r);
    return query(b, i, kv_head * group.size() + r - i * group.size());
  }
};

AttentionCall attention_call(const ops::Attention::Args& a);

/// Copies a tile of keys and values into shared memory; the cache holds `keys` of them. All warps of a block call. Each
/// run is one copy of the copy engine, which is fastest with few long copies. Values beyond `keys` become zeros,
/// because a weight of 0 times NaN would be NaN. Scores of keys beyond `keys` are never used. `full` completes after
/// kTileArrivals arrivals and the copies' bytes.
/// Run `apart` has a call of its own: with `only`, a call copies this run alone, and without it the others. Where
/// `apart` is no run of the tile, a call without `only` copies the whole tile.
/// copy(to, values, r, from, bytes) copies the keys of run r to `to` and their values to `values`. So many bytes of the
/// run are in the cache; its first key is `from` elements behind the tile's. Without `copy` the keys lie one behind the
/// other from k on, and the values from v.
template <int TileKeys, class T, class Copy>
__device__ void copy_tile(T* tile, int keys, int head_dim, std::uint64_t* full, int apart, bool only, Copy copy) {
  constexpr int run = TileKeys / 8, runs = kTileArrivals / kAttentionWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pitch = run_pitch(TileKeys, head_dim);
#pragma unroll 1
  for (int i = 0; i < runs; ++i) {
    const int r = warp * runs + i, from = r * run * head_dim;
    if ((r == apart) != only) continue;
    const int elements = max(0, min(keys - r * run, run)) * head_dim, bytes = elements * int(sizeof(T));
    T *const to = tile + r * pitch, *const values = to + 8 * pitch;
    copy(to, values, r, from, bytes);
#pragma unroll 1
    for (int e = elements + lane * kVec; e < run * head_dim; e += 32 * kVec) *reinterpret_cast<uint4*>(values + e) = {};
    __syncwarp();
    if (lane == 0) arrive_expecting(full, 2 * bytes);
  }
}
template <int TileKeys, class T>
__device__ void copy_tile(T* tile, const T* k, const T* v, int keys, int head_dim, std::uint64_t* full, int apart = -1,
                          bool only = false) {
  copy_tile<TileKeys>(tile, keys, head_dim, full, apart, only, [&](T* to, T* values, int, int from, int bytes) {
    if (bytes > 0 && elected()) {
      copy_bulk(to, k + from, bytes, full);
      copy_bulk(values, v + from, bytes, full);
    }
  });
}

/// A lane's registers of mma()'s operand a, which is 16 x 16.
struct Fragment {
  std::uint32_t a[4];
};

/// Loads queries as rows of operand a: row(r) is the query of row g + 8r, or null for a row of zeros. With Rows = 1 the
/// query of row g is that of row g + 8, too.
template <class T, int HeadDim, int Rows, class Row>
__device__ void load_queries(Fragment (&q)[HeadDim / 16], int head_dim, const Row& row) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const T* x = row(r);
#pragma unroll
    for (int i = 0; i < HeadDim / 8; ++i) {
      const int column = 8 * i + 2 * t;
      std::uint32_t* a = q[i / 2].a + i % 2 * 2;
      a[r] = x && column < head_dim ? *reinterpret_cast<const std::uint32_t*>(x + column) : 0;
      if constexpr (Rows == 1) a[1] = a[0];
    }
  }
}

/// Two weights, each as two numbers of T: the rounded value and the residual. One rounding alone would cost as much
/// accuracy as the rounding of the result.
template <class T>
struct SplitWeights {
  std::uint32_t high, low;

  __device__ SplitWeights(float first, float second) : high(pack_pair<T>(first, second)) {
    const float2 rounded = unpack(high, T{});
    low = pack_pair<T>(first - rounded.x, second - rounded.y);
  }
};

/// A warp's queries and their softmax-weighted sums so far. The queries are the rows of `Operands` operands of 16 rows,
/// which share each load of keys and values. With g = lane / 4 and t = lane % 4 a lane holds columns 8n + 2t and
/// 8n + 2t + 1 of rows g and g + 8 of each operand.
/// Rows = 2: each row is a query. Rows = 1: rows g and g + 8 are the same query. A weight enters the product as
/// SplitWeights has it. With Rows = 1 the upper eight rows multiply the rounded values, the lower eight the rests, and
/// the caller adds both.
/// Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691).
template <class T, int HeadDim, int TileKeys, int Keys, int Rows, int Operands = 1>
struct AttentionRows {
  Fragment q[Operands][HeadDim / 16];
  float values[Operands][HeadDim / 8][4] = {};
  SoftmaxState state[Operands][Rows];  // each sum is over the lane's own columns
  int head_dim;

  /// row(operand, r) is the query of row g + 8r, or null for a row of zeros.
  template <class Row>
  __device__ AttentionRows(int head_dim, Row row) : head_dim(head_dim) {
#pragma unroll
    for (int m = 0; m < Operands; ++m) load_queries<T, HeadDim, Rows>(q[m], head_dim, [&](int r) { return row(m, r); });
  }

  /// Adds Keys keys and values of a tile in shared memory: Keys / 8 of each run, from the run's key `first` on. Row i
  /// of an 8 x 8 matrix is a key of run i. Row g + 8r of an operand sees the tile's first visible(operand, r) keys, but
  /// not the first hidden(operand, r) of them.
  template <class Visible>
  __device__ void attend(const T* tile, int first, float scale, Visible visible) {
    attend(tile, first, scale, visible, nullptr);
  }
  template <class Visible, class Hidden>
  __device__ void attend(const T* tile, int first, float scale, Visible visible, Hidden hidden) {
    const int lane = threadIdx.x % 32, pitch = run_pitch(TileKeys, head_dim), next_key = head_dim;
    const T* of_lane = tile + lane % 8 * pitch + first * next_key;
    const std::uint32_t k = shared_address(of_lane + lane / 16 * next_key + lane / 8 % 2 * 8);
    const std::uint32_t v = shared_address(of_lane + 8 * pitch + lane / 8 % 2 * next_key + lane / 16 * 8);

    float s[Operands][Keys / 8][4] = {};
#pragma unroll
    for (int i = 0; i < HeadDim / 16; ++i)
#pragma unroll
      for (int j = 0; j < Keys / 16; ++j) {
        uint4 b = load_matrices(k + (2 * j * next_key + 16 * i) * int(sizeof(T)));
        // Elements behind head_dim are another key's or undefined, so possibly NaN.
        if (16 * i >= head_dim) b.x = b.z = 0;
        if (16 * i + 8 >= head_dim) b.y = b.w = 0;
#pragma unroll
        for (int m = 0; m < Operands; ++m) {
          const auto& a = q[m][i].a;
          mma(s[m][2 * j], a[0], a[1], a[2], a[3], b.x, b.y, T{});
          mma(s[m][2 * j + 1], a[0], a[1], a[2], a[3], b.z, b.w, T{});
        }
      }
#pragma unroll
    for (int m = 0; m < Operands; ++m)
#pragma unroll
      for (int r = 0; r < Rows; ++r)
        if constexpr (std::is_null_pointer_v<Hidden>)
          weigh_row(s[m], values[m], r, state[m][r], scale, visible(m, r) - first, nullptr);
        else
          weigh_row(s[m], values[m], r, state[m][r], scale, visible(m, r) - first, hidden(m, r) - first);

#pragma unroll
    for (int j = 0; j < Keys / 16; ++j) {
      Fragment high[Operands], low[Operands];
#pragma unroll
      for (int m = 0; m < Operands; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* p = s[m][2 * j + i / 2] + (Rows == 1 ? 0 : i % 2 * 2);
          const SplitWeights<T> split(p[0], p[1]);
          high[m].a[i] = split.high;
          low[m].a[i] = split.low;
        }
        if constexpr (Rows == 1) {
          high[m].a[1] = low[m].a[0];
          high[m].a[3] = low[m].a[2];
        }
      }
#pragma unroll
      for (int i = 0; i < HeadDim / 16; ++i) {
        const uint4 b = load_matrices_transposed(v + (2 * j * next_key + 16 * i) * int(sizeof(T)));
#pragma unroll
        for (int m = 0; m < Operands; ++m) {
          const auto add = [&](const std::uint32_t(&p)[4]) {
            mma(values[m][2 * i], p[0], p[1], p[2], p[3], b.x, b.y, T{});
            mma(values[m][2 * i + 1], p[0], p[1], p[2], p[3], b.z, b.w, T{});
          };
          add(high[m].a);
          if constexpr (Rows == 2) add(low[m].a);
        }
      }
    }
  }

  /// The sum of a row's weights, in all lanes of the row.
  __device__ float weights(int operand, int r) const { return quad_sum(state[operand][r].sum); }

 private:
  /// Replaces the scores of row r by their softmax weights. The row sees the keys [hidden, visible), counted from the
  /// first of s; without `hidden` all before `visible`.
  template <class Hidden>
  static __device__ void weigh_row(float (&s)[Keys / 8][4], float (&values)[HeadDim / 8][4], int r, SoftmaxState& state,
                                   float scale, int visible, [[maybe_unused]] Hidden hidden) {
    const int t = threadIdx.x % 4;
    constexpr int run = TileKeys / 8, last = TileKeys - run + Keys / 8;
    constexpr bool hides = !std::is_null_pointer_v<Hidden>;
    bool masked = visible < last;
    if constexpr (hides) masked = masked || hidden > 0;
    if (__any_sync(~0u, masked)) {
#pragma unroll
      for (int i = 0; i < Keys / 4; ++i) {
        const int key = (2 * t + i % 2) * run + i / 2;
        float& score = s[i / 2][2 * r + i % 2];
        if (key >= visible) score = -INFINITY;
        if constexpr (hides)
          if (key < hidden) score = -INFINITY;
      }
    }
    weigh<Keys / 4, Rows == 1>(
        state, scale, [&](int i) -> float& { return s[i / 2][2 * r + i % 2]; },
        [&](float factor) {
#pragma unroll
          for (int n = 0; n < HeadDim / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4 / Rows; ++e) values[n][2 * r + e] *= factor;
        });
  }
};

/// Vec neighbouring columns of a query's weighted sum, not yet divided by the sum of weights. Vec is 1 or 4.
template <int Vec>
struct MergedParts {
  float values[Vec] = {};
  SoftmaxState state;
};

/// The sum of `count` partial results in their order, each rescaled to the largest maximum. Only the additions depend
/// on each other; the factors do not. At least one part has keys, or the result is NaN, as it should be: so the factors
/// do without SoftmaxState::factor()'s case for empty states, whose branches would add 60 instructions.
template <int Vec>
__device__ MergedParts<Vec> merge_parts(const float* parts, int count, int head_dim, int column) {
  const int stride = part_floats(head_dim);
  MergedParts<Vec> m;
#pragma unroll 4
  for (int p = 0; p < count; ++p) m.state.max = fmaxf(m.state.max, parts[p * stride + head_dim]);
#pragma unroll 4
  for (int p = 0; p < count; ++p) {
    const float* part = parts + p * stride;
    const float factor = expf(part[head_dim] - m.state.max);
    m.state.sum += part[head_dim + 1] * factor;
    alignas(Vec * sizeof(float)) float values[Vec];
    if constexpr (Vec == 1)
      values[0] = part[column];
    else
      *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(part + column);
#pragma unroll
    for (int e = 0; e < Vec; ++e) m.values[e] += values[e] * factor;
  }
  return m;
}

/// The end of a lone head's attention. Each block merges its `count` partial results and sends the sum to the block of
/// split 0, which merges the sums of the `used` splits that have keys and stores y. All threads of these splits' blocks
/// call, after the inbox was opened. `sent` has room for `used` partial results, at the same offset in every block.
template <class T>
__device__ void finish_attention(const float* parts, int count, float* sent, ClusterInbox& inbox, int split, int used,
                                 int head_dim, T* y) {
  const int columns = head_dim + 2, stride = part_floats(head_dim);
  __syncthreads();
  if (used > 1) {
    inbox.connect();
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
      const auto m = merge_parts<1>(parts, count, head_dim, column);
      inbox.send(0, sent + split * stride + column,
                 column < head_dim    ? m.values[0]
                 : column == head_dim ? m.state.max
                                      : m.state.sum);
    }
    if (split > 0) return;
    inbox.receive(used * columns * int(sizeof(float)));
    parts = sent;
    count = used;
  }
  for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
    const auto m = merge_parts<1>(parts, count, head_dim, column);
    y[column] = from_float<T>(m.values[0] / m.state.sum);
  }
}

/// Calls f(head, v) for vectors 0 to `vectors` - 1 of each of `heads` heads. The block's threads take them in turn.
template <class F>
__device__ void for_each_vector(int heads, int vectors, F f) {
  int head = 0;
#pragma unroll 1
  for (int v = threadIdx.x;; v += blockDim.x) {
    for (; v >= vectors && head < heads; v -= vectors) ++head;
    if (head == heads) return;
    f(head, v);
  }
}

/// finish_attention() for the `heads` heads of a GQA tile. `parts` are `count` partial results of the first head, then
/// those of the next. The sums of head h meet in the block of split h % used, which stores the head's y. `sent` has
/// room for inbox_parts() partial results.
template <class T>
__device__ void finish_gqa_tile(const float* parts, int count, int heads, float* sent, ClusterInbox& inbox, int split,
                                int used, int head_dim, T* y) {
  constexpr int vec = 4;
  const int vectors = head_dim / vec, stride = part_floats(head_dim);
  int own = 0;  // heads that this block stores
  for (int head = split; head < heads; head += used) ++own;
  __syncthreads();
  if (used > 1) {
    inbox.connect();
    for_each_vector(heads, vectors + 1, [&](int head, int v) {
      int to = head;  // % used
      while (to >= used) to -= used;
      auto m = merge_parts<vec>(parts + head * count * stride, count, head_dim, v * vec);
      if (v == vectors) {
        m.values[0] = m.state.max;
        m.values[1] = m.state.sum;
      }
      inbox.send(to, sent + (head - to + split) * stride + v * vec, m.values);
    });
    if (own == 0) return;
    inbox.receive(own * used * stride * int(sizeof(float)));
    parts = sent;
    count = used;
  }
  for_each_vector(own, vectors, [&](int i, int v) {
    auto m = merge_parts<vec>(parts + i * count * stride, count, head_dim, v * vec);
#pragma unroll
    for (float& value : m.values) value /= m.state.sum;
    store_few(y + (split + i * used) * head_dim + v * vec, m.values);
  });
}

}  // namespace cf::cuda
