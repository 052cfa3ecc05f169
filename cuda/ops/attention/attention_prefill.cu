#include "core/ops/attention.hpp"
#include "cuda/ops/attention/attention.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

constexpr int kThreads = 32 * kAttentionWarps;

/// A block attends with prefill_rows() rows of one sequence and kv head to all keys that the last of them sees. The
/// next tiles of keys and values are copied while the warps attend to one.
template <class T, int HeadDim>
__global__ void __launch_bounds__(kThreads) prefill_kernel(const __grid_constant__ AttentionCall c) {
  constexpr int step = keys_at_once(HeadDim), tile_keys = prefill_tile(HeadDim),
                stage = tile_bytes(tile_keys, HeadDim) / int(sizeof(T));
  constexpr int block_rows = prefill_rows(HeadDim), operands = block_rows * 2 / kThreads;
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

  // Blocks with more keys start earlier.
  const int block_first = int(gridDim.x - 1 - blockIdx.x) * block_rows, kv_head = blockIdx.y, b = blockIdx.z;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int first_row = block_first + warp * 16 * operands;
  const int sees = c.visible_keys(c.kv_len[b], 0);  // keys that query 0 sees; query i sees i more
  const int keys = sees ? sees + c.query_of(min(block_first + block_rows, c.rows()) - 1) : 0;
  const int tiles = (keys + tile_keys - 1) / tile_keys;
  const auto fetch = [&](int i) {
    if (i >= tiles) return;
    const long from = c.cache.rows(b, kv_head, i * tile_keys, tile_keys).first;
    copy_tile<tile_keys>(ring + i % kPrefillStages * stage, static_cast<const T*>(c.k_cache) + from,
                         static_cast<const T*>(c.v_cache) + from, keys - i * tile_keys, c.head_dim,
                         full + i % kPrefillStages);
  };
  for (int i = 0; i < kPrefillStages - 1; ++i) fetch(i);

  const auto row_of = [&](int operand, int r) { return first_row + 16 * operand + 8 * r + g; };
  AttentionRows<T, HeadDim, tile_keys, step, 2, operands> rows(c.head_dim, [&](int operand, int r) {
    const int row = row_of(operand, r);
    return row < c.rows() ? static_cast<const T*>(c.q) + c.row(b, kv_head, row) : nullptr;
  });
  int row_keys[operands][2];  // that the lane's rows see; none where the warp has no row
#pragma unroll
  for (int m = 0; m < operands; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) row_keys[m][r] = first_row < c.rows() ? sees + c.query_of(row_of(m, r)) : 0;
  for (int i = 0; i < tiles; ++i) {
    __syncthreads();  // no warp reads tile i - 1 any more
    fetch(i + kPrefillStages - 1);
    wait_barrier(full + i % kPrefillStages, i / kPrefillStages % 2);
    const int first = i * tile_keys;
    if (__all_sync(~0u, first >= row_keys[operands - 1][1])) continue;  // a lane's last row sees the most
#pragma unroll 1
    for (int s = 0; s < tile_keys / 8; s += step / 8)
      rows.attend(ring + i % kPrefillStages * stage, s, c.scale,
                  [&](int operand, int r) { return row_keys[operand][r] - first; });
  }

#pragma unroll
  for (int m = 0; m < operands; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float weights = rows.weights(m, r);
      const int row = row_of(m, r);
      if (row >= c.rows()) continue;
      T* y = static_cast<T*>(c.y) + c.row(b, kv_head, row) + 2 * t;
#pragma unroll
      for (int n = 0; n < HeadDim / 8; ++n)
        if (8 * n < c.head_dim)
          *reinterpret_cast<std::uint32_t*>(y + 8 * n) =
              pack_pair<T>(rows.values[m][n][2 * r] / weights, rows.values[m][n][2 * r + 1] / weights);
    }
}

template <class T>
auto kernel_for(int padded) {
  switch (padded) {
    case 64: return prefill_kernel<T, 64>;
    case 80: return prefill_kernel<T, 80>;
    case 128: return prefill_kernel<T, 128>;
    default: return prefill_kernel<T, kMaxHeadDim>;
  }
}

}  // namespace

Status launch_attention_prefill(const ops::Attention::Args& a, const PrefillPlan& plan, LaunchList& launches) {
  const AttentionCall c = attention_call(a);
  const int padded = padded_head_dim(c.head_dim);
  const LaunchShape shape{
      .grid = dim3(unsigned(plan.row_blocks), unsigned(c.cache.heads()), unsigned(a.kv_len.shape[0])),
      .block = kThreads,
      .smem_bytes = std::size_t(plan.smem_bytes)};
  return launch(ops::Attention::name, launches, shape,
                a.q.dtype == DType::f16 ? kernel_for<f16>(padded) : kernel_for<bf16>(padded), c);
}

}  // namespace cf::cuda
