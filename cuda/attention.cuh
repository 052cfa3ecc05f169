#pragma once
// What the attention kernels share: a warp's attention over a tile of keys on tensor cores, and the merge of parts.
#include "cuda/attention.hpp"
#include "cuda/check.hpp"
#include "cuda/device/async.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"

namespace cf::cuda {

/// What a kernel needs of the call.
struct AttentionCall {
  const void *q, *k_cache, *v_cache;
  const std::int32_t* kv_len;
  void* y;
  float scale;
  int q_len, heads, head_dim;
  long capacity;

  /// Keys that query i of a sequence with n valid entries sees. A kv_len that the cache has no room for reads nothing;
  /// the result is then NaN.
  __device__ int visible_keys(int n, int i) const { return n < q_len || n > capacity ? 0 : n - q_len + i + 1; }
  __device__ long query(int b, int i, int head) const { return ((long(b) * q_len + i) * heads + head) * head_dim; }
  __device__ long cache(int b, int head) const { return (long(b) * heads + head) * capacity * head_dim; }
};

/// Attention of many new tokens, 16-bit activations: cuda/attention_prefill.cu.
Status run_prefill(const AttentionCall&, DType activation, std::int64_t batch, const Context&);

/// Brings a tile of keys and values into shared memory, of which `keys` are there, by all warps of a block. The copy
/// engine takes few but long copies: a run each. Values beyond `keys` become zeros, since a weight of 0 makes nothing
/// of a NaN; keys beyond are never looked at. `full` takes kTileArrivals.
template <int TileKeys, class T>
__device__ void copy_tile(T* tile, const T* k, const T* v, int keys, int head_dim, std::uint64_t* full) {
  constexpr int run = TileKeys / 8, runs = kTileArrivals / kAttentionWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pitch = run_pitch(TileKeys, head_dim);
#pragma unroll 1
  for (int i = 0; i < runs; ++i) {
    const int r = warp * runs + i, from = r * run * head_dim;
    const int elements = max(0, min(keys - r * run, run)) * head_dim, bytes = elements * int(sizeof(T));
    T *const to = tile + r * pitch, *const values = to + 8 * pitch;
    if (bytes > 0 && elected()) {
      copy_bulk(to, k + from, bytes, full);
      copy_bulk(values, v + from, bytes, full);
    }
#pragma unroll 1
    for (int e = elements + lane * kVec; e < run * head_dim; e += 32 * kVec) *reinterpret_cast<uint4*>(values + e) = {};
    __syncwarp();
    if (lane == 0) arrive_expecting(full, 2 * bytes);
  }
}

/// Two floats as two elements of T in one register, the first in the lower half.
template <class T>
__device__ std::uint32_t pack_pair(float x, float y) {
  if constexpr (dtype_of<T> == DType::f16) {
    const __half2 h = __floats2half2_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(h);
  }
}

inline constexpr float kLog2E = 1.4426950408889634f;

/// A lane's share of a 16 x 16 operand of mma().
struct Fragment {
  std::uint32_t a[4];
};

/// A warp's queries with what they have gathered so far, after FlashAttention-2 (Dao 2023, arXiv:2307.08691): operands
/// of 16 rows, which share each load of keys and values. With g = lane / 4 and t = lane % 4 a lane has columns 8n + 2t
/// and 8n + 2t + 1 of rows g and g + 8 of each. Rows = 1: all rows of an operand are one query, and their two halves
/// take the two halves of its weights. Rows = 2: each row is a query. A weight is rounded to T twice, its value and
/// what that leaves: one rounding alone would cost as much as the result's.
template <class T, int HeadDim, int TileKeys, int Keys, int Rows, int Operands = 1>
struct AttentionRows {
  Fragment q[Operands][HeadDim / 16];
  float values[Operands][HeadDim / 8][4] = {};
  SoftmaxState state[Operands][Rows];  // the sums are of the lane's own columns
  int head_dim;

  /// row(operand, r): rows g and g + 8, or null for a row of zeros.
  template <class Row>
  __device__ AttentionRows(int head_dim, Row row) : head_dim(head_dim) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < Operands; ++m)
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const T* x = row(m, r);
#pragma unroll
        for (int i = 0; i < HeadDim / 8; ++i) {
          const int column = 8 * i + 2 * t;
          std::uint32_t* a = q[m][i / 2].a + i % 2 * 2;
          a[r] = x && column < head_dim ? *reinterpret_cast<const std::uint32_t*>(x + column) : 0;
          if constexpr (Rows == 1) a[1] = a[0];
        }
      }
  }

  /// Takes Keys keys and values of a tile in shared memory: Keys / 8 of each run, from `first` on. Row i of an 8 x 8
  /// matrix is of run i. Row r of an operand sees those among the tile's first visible(operand, r).
  template <class Visible>
  __device__ void attend(const T* tile, int first, float scale, Visible visible) {
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
        if (16 * i >= head_dim) b.x = b.z = 0;  // of another key, or of none: maybe NaN
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
      for (int r = 0; r < Rows; ++r) weigh(s[m], values[m], r, state[m][r], scale, visible(m, r) - first);

#pragma unroll
    for (int j = 0; j < Keys / 16; ++j) {
      Fragment high[Operands], low[Operands];
#pragma unroll
      for (int m = 0; m < Operands; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* p = s[m][2 * j + i / 2] + (Rows == 1 ? 0 : i % 2 * 2);
          high[m].a[i] = pack_pair<T>(p[0], p[1]);
          const float2 rounded = unpack(high[m].a[i], T{});
          low[m].a[i] = pack_pair<T>(p[0] - rounded.x, p[1] - rounded.y);
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

  /// The sum of a row's weights.
  __device__ float weights(int operand, int r) const {
    float sum = state[operand][r].sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

 private:
  /// Makes weights of row r's scores and brings what the row has to their maximum.
  static __device__ void weigh(float (&s)[Keys / 8][4], float (&values)[HeadDim / 8][4], int r, SoftmaxState& state,
                               float scale, int visible) {
    const int t = threadIdx.x % 4;
    constexpr int run = TileKeys / 8, last = TileKeys - run + Keys / 8;
    if (__any_sync(~0u, visible < last)) {
#pragma unroll
      for (int i = 0; i < Keys / 4; ++i)
        if ((2 * t + i % 2) * run + i / 2 >= visible) s[i / 2][2 * r + i % 2] = -INFINITY;
    }
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < Keys / 4; ++i) top = fmaxf(top, s[i / 2][2 * r + i % 2]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
    if (Rows == 1 || __any_sync(~0u, top > state.max)) {
      top = fmaxf(top, state.max);
      const float factor = exp2_approximate((state.max - top) * kLog2E);
      state.sum *= factor;
      state.max = top;
#pragma unroll
      for (int n = 0; n < HeadDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4 / Rows; ++e) values[n][2 * r + e] *= factor;
    }
    const float to_log2 = scale * kLog2E, shift = state.max * kLog2E;
#pragma unroll
    for (int i = 0; i < Keys / 4; ++i) {
      float& p = s[i / 2][2 * r + i % 2];
      p = exp2_approximate(p * to_log2 - shift);
      state.sum += p;
    }
  }
};

/// One column of a query's attention.
struct MergedParts {
  float value = 0;
  SoftmaxState state;
};

/// The sum of `count` parts in their order, each brought to the largest maximum: the factors are independent, so that
/// only the sums are a chain.
__device__ inline MergedParts merge_parts(const float* parts, int count, int head_dim, int column) {
  const int stride = part_floats(head_dim);
  MergedParts m;
#pragma unroll 4
  for (int p = 0; p < count; ++p) m.state.max = fmaxf(m.state.max, parts[p * stride + head_dim]);
#pragma unroll 4
  for (int p = 0; p < count; ++p) {
    const float* part = parts + p * stride;
    const float factor = expf(part[head_dim] - m.state.max);
    m.state.sum += part[head_dim + 1] * factor;
    m.value += part[column] * factor;
  }
  return m;
}

/// The end of a query's attention: merges the block's `count` parts, sends the result to the first of the `used` splits
/// that have keys, which merges those and writes y. All threads of these splits' blocks call, after the inbox was made;
/// `sent` has room for `used` parts, at the same offset in every block.
template <class T>
__device__ void finish_attention(const float* parts, int count, float* sent, ClusterInbox& inbox, int split, int used,
                                 int head_dim, T* y) {
  const int columns = head_dim + 2, stride = part_floats(head_dim);
  __syncthreads();
  if (used > 1) {
    inbox.connect();
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
      const MergedParts m = merge_parts(parts, count, head_dim, column);
      inbox.send(0, sent + split * stride + column,
                 column < head_dim    ? m.value
                 : column == head_dim ? m.state.max
                                      : m.state.sum);
    }
    if (split > 0) return;
    inbox.receive(used * columns * int(sizeof(float)));
    parts = sent;
    count = used;
  }
  for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
    const MergedParts m = merge_parts(parts, count, head_dim, column);
    y[column] = from_float<T>(m.value / m.state.sum);
  }
}

}  // namespace cf::cuda
