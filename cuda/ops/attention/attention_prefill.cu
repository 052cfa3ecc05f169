#include <algorithm>
#include <limits>

#include "core/ops/attention.hpp"
#include "cuda/device/overwrite.cuh"
#include "cuda/ops/attention/prefill.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

constexpr int kThreads = 32 * kAttentionWarps;

/// The tiles of keys that a block of an AttentionCall attends to: those of all keys.
struct AllBlockTiles {
  int keys, tile_keys;
  __device__ int count() const { return (keys + tile_keys - 1) / tile_keys; }
  __device__ int first(int tile) const { return tile * tile_keys; }
};

/// The tiles of keys that a block of a PrefillCall attends to, each with the entries [low, high) of which the values
/// count. The sinks come first, for they have queries of their own. A tile with sinks and keys of the window is there
/// twice. Little is kept, because the kernels have no registers left; without Sinks there are none.
template <int TileKeys, bool Sinks>
class BlockTiles {
 public:
  /// `visible` keys up to their own have the block's first row, which sees the fewest, and its last row.
  __device__ BlockTiles(const PrefillCall& c, const TableRun& run, int first_visible, int last_visible)
      : c_(c), low_(run.first_key(first_visible)), high_(last_visible) {}

  __device__ int count() const { return sink_tiles() + (high_ + TileKeys - 1) / TileKeys - low_ / TileKeys; }
  __device__ bool is_sinks(int tile) const { return tile < sink_tiles(); }
  __device__ int sink_tiles() const { return (sinks() + TileKeys - 1) / TileKeys; }
  /// A tile's first entry.
  __device__ int first(int tile) const {
    return (is_sinks(tile) ? tile : low_ / TileKeys + tile - sink_tiles()) * TileKeys;
  }
  __device__ int low(int tile) const { return is_sinks(tile) ? 0 : low_; }
  __device__ int high(int tile) const { return is_sinks(tile) ? sinks() : high_; }

 private:
  __device__ int sinks() const { return Sinks ? min(c_.sinks, high_) : 0; }
  const PrefillCall& c_;
  int low_, high_;
};

/// copy_tile() for caches of every kind; without Streams, for all but rings. It copies those of the entries
/// [first, first + TileKeys) that lie in [low, high). The other values become zeros.
template <int TileKeys, bool Streams, class T>
__device__ void copy_some(T* tile, const PrefillCall& c, int sequence, int kv_head, int first, int low, int high,
                          std::uint64_t* full) {
  constexpr int run = TileKeys / 8, runs = kTileArrivals / kAttentionWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pitch = run_pitch(TileKeys, c.head_dim);
#pragma unroll 1
  for (int i = 0; i < runs; ++i) {
    const int r = warp * runs + i, from = first + r * run;
    T* const values = tile + (8 + r) * pitch;
    const int begin = min(max(low - from, 0), run), end = max(min(high - from, run), begin);
    const auto copy = [&](int k, int n, std::int64_t element) {
      const int bytes = n * c.head_dim * int(sizeof(T));
      const std::uint32_t to = shared_address(values + k * c.head_dim), arrived = shared_address(full);
      copy_bulk(to - 8 * pitch * int(sizeof(T)), static_cast<const T*>(c.k_cache) + element, bytes, arrived);
      copy_bulk(to, static_cast<const T*>(c.v_cache) + element, bytes, arrived);
    };
    if (begin < end && elected()) {
      if constexpr (Streams) {
#pragma unroll 1
        for (int k = begin; k < end;) {
          const CacheRows rows = c.cache.rows(sequence, kv_head, from + k, end - k);
          copy(k, int(rows.count), rows.first);
          k += int(rows.count);
        }
      } else {
        const auto [matrix, row] = c.cache.at_index(sequence, kv_head, from + begin);  // in one page
        copy(begin, end - begin, (matrix * c.cache.matrix_rows() + row) * c.head_dim);
      }
    }
#pragma unroll 1
    for (int e = lane * kVec; e < run * c.head_dim; e += 32 * kVec)
      if (e < begin * c.head_dim || e >= end * c.head_dim) *reinterpret_cast<uint4*>(values + e) = {};
    let_copies_overwrite();  // a later tile's
    __syncwarp();
    if (lane == 0) arrive_expecting(full, 2 * (end - begin) * c.head_dim * int(sizeof(T)));
  }
}

/// A block attends with prefill_rows() rows of one run and kv head to all keys that one of them sees. The next tiles of
/// keys and values are copied while the warps attend to one. Call is one of prefill.cuh's.
template <class T, int HeadDim, class Call>
__global__ void __launch_bounds__(kThreads) prefill_kernel(const __grid_constant__ Call c) {
  constexpr bool has_window = std::is_same_v<Call, PrefillCall>;
  constexpr int step = keys_at_once(HeadDim), tile_keys = prefill_tile(HeadDim),
                stage = tile_bytes(tile_keys, HeadDim) / int(sizeof(T));
  constexpr int block_rows = has_window ? prefill_runs_rows(HeadDim) : prefill_rows(HeadDim),
                operands = block_rows * 2 / kThreads;
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ std::uint64_t full[kPrefillStages];
  T* const ring = reinterpret_cast<T*>(smem);
  if (threadIdx.x < kPrefillStages) {
    init_barrier(full + threadIdx.x, kTileArrivals);
    publish_barriers();
  }
  __syncthreads();
  let_successor_start();
  wait_for_predecessors();

  const int kv_head = has_window ? blockIdx.x : blockIdx.y;
  const auto run = run_of_block(c, has_window ? blockIdx.y : blockIdx.x, gridDim.x, block_rows);
  const int block_first = run.block_first;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int first_row = block_first + warp * 16 * operands;
  const int sees = run.sees(c.kv_len[run.sequence()]);  // keys that query 0 sees; query i sees i more
  const int keys = sees ? sees + run.query_of(min(block_first + block_rows, run.rows()) - 1) : 0;
  const auto tiles = [&] {
    if constexpr (has_window)
      return BlockTiles<tile_keys, takes_streams(HeadDim)>(c, run, sees ? sees + run.query_of(block_first) : 0, keys);
    else
      return AllBlockTiles{keys, tile_keys};
  }();
  [[maybe_unused]] const int count = tiles.count();
  const auto fetch = [&](int i) {
    if (i >= (has_window ? tiles.count() : count)) return;
    T* const to = ring + i % kPrefillStages * stage;
    std::uint64_t* const arrived = full + i % kPrefillStages;
    if constexpr (has_window) {
      copy_some<tile_keys, takes_streams(HeadDim)>(to, c, run.sequence(), kv_head, tiles.first(i), tiles.low(i),
                                                   tiles.high(i), arrived);
    } else {
      const long from = c.cache.rows(run.sequence(), kv_head, i * tile_keys, tile_keys).first;
      copy_tile<tile_keys>(to, static_cast<const T*>(c.k_cache) + from, static_cast<const T*>(c.v_cache) + from,
                           keys - i * tile_keys, c.head_dim, arrived);
    }
  };
  for (int i = 0; i < kPrefillStages - 1; ++i) fetch(i);

  const auto row_of = [&](int operand, int r) { return first_row + 16 * operand + 8 * r + g; };
  const auto query = [&](const void* q, int operand, int r) {
    const int row = row_of(operand, r);
    return row < run.rows() ? static_cast<const T*>(q) + run.row(kv_head, row) : nullptr;
  };
  AttentionRows<T, HeadDim, tile_keys, step, 2, operands> rows(
      c.head_dim, [&](int m, int r) { return has_window ? nullptr : query(c.q, m, r); });
  int row_keys[operands][2];  // how many keys each of the lane's rows sees; 0 where the warp has no row
#pragma unroll
  for (int m = 0; m < operands; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_keys[m][r] = first_row < run.rows() ? sees + run.query_of(row_of(m, r)) : 0;
      if constexpr (has_window) rows.state[m][r].max = kLowestScore;
    }
  const auto attend = [&](int i) {
    __syncthreads();  // no warp reads tile i - 1 any more
    fetch(i + kPrefillStages - 1);
    wait_barrier(full + i % kPrefillStages, i / kPrefillStages % 2);
    const T* const tile = ring + i % kPrefillStages * stage;
    const int first = tiles.first(i);
    if (__all_sync(~0u, first >= row_keys[operands - 1][1])) return;  // a lane's last row sees the most
#pragma unroll 1
    for (int s = 0; s < tile_keys / 8; s += step / 8)
      if constexpr (has_window) {
        const bool is_sinks = tiles.is_sinks(i);
        rows.attend(
            tile, s, c.scale,
            [&](int m, int r) { return (is_sinks ? min(row_keys[m][r], c.sinks) : row_keys[m][r]) - first; },
            [&](int m, int r) { return is_sinks ? 0 : run.first_key(row_keys[m][r]) - first; });
      } else {
        rows.attend(tile, s, c.scale, [&](int m, int r) { return row_keys[m][r] - first; });
      }
  };
  if constexpr (has_window) {
#pragma unroll 1
    for (int i = 0; i < tiles.count();) {
      const void* const q = tiles.is_sinks(i) ? c.q_sinks : c.q;
#pragma unroll
      for (int m = 0; m < operands; ++m)
        load_queries<T, HeadDim, 2>(rows.q[m], c.head_dim, [&](int r) { return query(q, m, r); });
      do attend(i);
      while (++i < tiles.count() && i != tiles.sink_tiles());
    }
  } else {
    for (int i = 0; i < count; ++i) attend(i);
  }

#pragma unroll
  for (int m = 0; m < operands; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float weights = rows.weights(m, r);
      const int row = row_of(m, r);
      if (row >= run.rows()) continue;
      T* y = static_cast<T*>(c.y) + run.row(kv_head, row) + 2 * t;
#pragma unroll
      for (int n = 0; n < HeadDim / 8; ++n)
        if (8 * n < c.head_dim)
          *reinterpret_cast<std::uint32_t*>(y + 8 * n) =
              pack_pair<T>(rows.values[m][n][2 * r] / weights, rows.values[m][n][2 * r + 1] / weights);
    }
}

template <class T, class Call>
auto kernel_for(int padded) {
  switch (padded) {
    case 64: return prefill_kernel<T, 64, Call>;
    case 80: return prefill_kernel<T, 80, Call>;
    case 128: return prefill_kernel<T, 128, Call>;
    default: return prefill_kernel<T, kMaxHeadDim, Call>;
  }
}

template <class Call>
Status add(const ops::Attention::Args& a, const Call& c, dim3 grid, int smem_bytes, LaunchList& launches) {
  const int padded = padded_head_dim(c.head_dim);
  const LaunchShape shape{.grid = grid, .block = kThreads, .smem_bytes = std::size_t(smem_bytes)};
  return launch(ops::Attention::name, launches, shape,
                a.q.dtype == DType::f16 ? kernel_for<f16, Call>(padded) : kernel_for<bf16, Call>(padded), c);
}

}  // namespace

PrefillCall prefill_call(const ops::Attention::Args& a, const PrefillTable& table) {
  const auto d = ops::Attention::dims(a);
  constexpr std::int64_t all = std::numeric_limits<int>::max();
  return {.q = a.q.data,
          .q_sinks = a.q_sinks.data,
          .k_cache = a.k_cache.data,
          .v_cache = a.v_cache.data,
          .kv_len = a.kv_len.data,
          .y = a.y.data,
          .scale = float(a.scale),
          .heads = int(d.heads),
          .head_dim = int(d.head_dim),
          .group = HeadGroup(d.heads / d.kv_heads),
          .window = int(a.window ? std::min(a.window.keys, all) : all),
          .sinks = int(std::min(a.window.sinks, all)),
          .cache = AnyCacheView(a.k_cache, a.page_table, d.max_kv_len > d.capacity ? a.window : KeyWindow{}),
          .table = table};
}

Status launch_attention_prefill(const ops::Attention::Args& a, const PrefillPlan& plan, LaunchList& launches) {
  const AttentionCall c = attention_call(a);
  return add(a, c, dim3(unsigned(plan.row_blocks), unsigned(c.cache.heads()), unsigned(a.kv_len.shape[0])),
             plan.smem_bytes, launches);
}

Status launch_attention_prefill_runs(const ops::Attention::Args& a, const PrefillRunsPlan& plan, LaunchList& launches) {
  for (const PrefillTable& table : plan.tables) {
    const PrefillCall c = prefill_call(a, table);
    CF_TRY(add(a, c, dim3(unsigned(c.cache.heads()), unsigned(table.blocks)), plan.smem_bytes, launches));
  }
  return {};
}

}  // namespace cf::cuda
