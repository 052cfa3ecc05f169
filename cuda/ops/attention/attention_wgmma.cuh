#pragma once
// Prefill attention on Hopper's tensor cores, for either call of prefill.cuh.
#include "core/ops/attention.hpp"
#include "cuda/device/ring.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/ops/attention/prefill.cuh"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace cf::cuda {

/// A ring's barriers. A stage is empty when every warp of the warpgroups is done with it.
template <int Stages>
struct RingBarriers {
  std::uint64_t full[Stages], empty[Stages];
};

/// A warpgroup's rows: queries and their softmax-weighted sums so far. With g = lane / 4 and t = lane % 4 a lane of
/// warp w holds rows 16w + g and 16w + g + 8, as wgmma() has them. Each start_ function issues its products as one
/// wgmma group. Until the caller has waited for the group and called the matching end_ function, nothing may touch the
/// group's registers. Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
template <class T, int HeadDim>
struct WarpgroupRows {
  static constexpr int kKeySteps = kWgmmaKeys / 16;
  /// The softmax weights of a tile's keys, split by SplitWeights, in operands of 16 keys.
  struct Weights {
    Fragment high[kKeySteps], low[kKeySteps];
  };

  Fragment q[HeadDim / 16];
  Weights weights;
  float scores[kWgmmaKeys / 2] = {}, values[HeadDim / 2] = {};
  SoftmaxState state[2];  // each sum is over the lane's own columns
  float factor[2];        // that brings `values` to the maxima of `state`

  /// Starts the queries' products with a tile of keys.
  __device__ void start_scores(const unsigned char* keys) {
    keep_in_registers(scores);
    wgmma_fence();
    const std::uint64_t k = tile_along_k(keys);
#pragma unroll
    for (int i = 0; i < HeadDim / 16; ++i)
      wgmma(scores, q[i].a, k + std::uint64_t(i / 4 * (kWgmmaTileBytes >> 4)) + i % 4 * kWgmmaStep, i > 0, T{});
    wgmma_commit();
  }
  __device__ void end_scores() { keep_in_registers(scores); }

  /// Starts the weights' products with a tile of values.
  __device__ void start_values(const unsigned char* tile) {
    keep_operands();
    wgmma_fence();
    const std::uint64_t v = tile_across_k(tile, kWgmmaTileBytes);
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      wgmma_across(values, weights.high[j].a, v + j * kWgmmaRows, T{});
      wgmma_across(values, weights.low[j].a, v + j * kWgmmaRows, T{});
    }
    wgmma_commit();
  }
  __device__ void end_values() { keep_operands(); }

  /// The weights of the scores. Row g + 8r sees the tile's first visible(r) keys; without `masked` it sees all of them.
  /// With `hidden`, a function of r, it does not see the first hidden(r) of them. `values` are left for
  /// rescale_values().
  template <class Visible, class Hidden>
  __device__ Weights weigh_scores(float scale, bool masked, Visible visible, Hidden hidden) {
    const auto score = [&](int r, int i) -> float& { return scores[i / 2 * 4 + 2 * r + i % 2]; };
    if (masked)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int keys = visible(r) - threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kWgmmaKeys / 4; ++i)
          if (i / 2 * 8 + i % 2 >= keys) score(r, i) = -INFINITY;
        if constexpr (!std::is_null_pointer_v<Hidden>) {
          const int before = hidden(r) - int(threadIdx.x % 4 * 2);
#pragma unroll
          for (int i = 0; i < kWgmmaKeys / 4; ++i)
            if (i / 2 * 8 + i % 2 < before) score(r, i) = -INFINITY;
        }
      }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      weigh<kWgmmaKeys / 4, true>(
          state[r], scale, [&](int i) -> float& { return score(r, i); }, [&](float f) { factor[r] = f; });
    Weights next;
#pragma unroll
    for (int i = 0; i < kWgmmaKeys / 4; ++i) {
      const SplitWeights<T> split(scores[2 * i], scores[2 * i + 1]);
      next.high[i / 4].a[i % 4] = split.high;
      next.low[i / 4].a[i % 4] = split.low;
    }
    return next;
  }
  /// Makes these the weights of the next products with values. `zero` is copy_registers()'s.
  __device__ void set_weights(const Weights& next, std::uint32_t zero) {
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      copy_registers(weights.high[j].a, next.high[j].a, zero);
      copy_registers(weights.low[j].a, next.low[j].a, zero);
    }
  }
  /// Waits for the products with values, and brings these to the maxima of the latest scores. They are multiplied even
  /// where no maximum grew: a warp that alone skipped this might go on in a copy of the code, and the warps of a
  /// warpgroup must start their products by the same instruction.
  __device__ void rescale_values() {
    wgmma_wait<0>();
    end_values();
#pragma unroll
    for (int i = 0; i < HeadDim / 2; ++i) values[i] *= factor[i / 2 % 2];
  }

  /// Stores row g + 8r of the result.
  __device__ void store(int r, int head_dim, T* y) const {
    const int t = threadIdx.x % 4;
    const float per_weight = 1 / quad_sum(state[r].sum);
    if (!y) return;
#pragma unroll
    for (int n = 0; n < HeadDim / 8; ++n)
      if (8 * n < head_dim) {
        const float* x = values + 4 * n + 2 * r;
        *reinterpret_cast<std::uint32_t*>(y + 8 * n + 2 * t) = pack_pair<T>(x[0] * per_weight, x[1] * per_weight);
      }
  }

 private:
  __device__ void keep_operands() {
    keep_in_registers(values);
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      keep_in_registers(weights.high[j].a);
      keep_in_registers(weights.low[j].a);
    }
  }
};

/// Replaces rows [first, end) of a tile by zeros. All lanes of a warp call.
template <int Columns>
__device__ void clear_rows(unsigned char* tile, int first, int end) {
#pragma unroll
  for (int i = 0; i < Columns; ++i)
#pragma unroll 1
    for (int byte = first * kTileRowBytes + int(threadIdx.x) % 32 * 16; byte < end * kTileRowBytes; byte += 32 * 16)
      *reinterpret_cast<uint4*>(tile + i * kWgmmaTileBytes + byte) = {};
  let_products_see();
}

/// A block attends with kWgmmaQueryRows rows a warpgroup, of one run and kv head, to all keys that one of them sees. A
/// warp of one warpgroup more keeps rings of tiles of keys and of values full. A warpgroup computes a tile's
/// weights while the tensor cores multiply the weights of the tile before with its values, or work for the other
/// warpgroup.
template <class T, int HeadDim, int Warpgroups, class Call>
__global__ void __launch_bounds__(wgmma_threads(Warpgroups), wgmma_blocks_per_sm(Warpgroups))
    wgmma_prefill_kernel([[maybe_unused]] const __grid_constant__ Call c,
                         [[maybe_unused]] const __grid_constant__ CUtensorMap k_map,
                         [[maybe_unused]] const __grid_constant__ CUtensorMap v_map) {
#ifdef CF_HAVE_WGMMA
  constexpr bool has_window = std::is_same_v<Call, PrefillCall>;
  constexpr int stages = wgmma_stages(Warpgroups), columns = wgmma_columns(HeadDim),
                stage_bytes = columns * kWgmmaTileBytes;
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ RingBarriers<stages> k_ring, v_ring;
  __shared__ std::uint64_t zeros_stored[has_window ? 2 : 1];  // behind the last key, before the first one
  unsigned char* const k_tiles = smem + (-shared_address(smem) & 1023);
  unsigned char* const v_tiles = k_tiles + stages * stage_bytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(&k_map);
    prefetch_map(&v_map);
    for (RingBarriers<stages>* ring : {&k_ring, &v_ring})
      for (int s = 0; s < stages; ++s) {
        init_barrier(ring->full + s, 1);
        init_barrier(ring->empty + s, 4 * Warpgroups);
      }
    for (std::uint64_t& stored : zeros_stored) init_barrier(&stored, 1);
    publish_barriers();
  }
  __syncthreads();
  let_successor_start();
  wait_for_predecessors();

  const auto run = run_of_block(c, blockIdx.y, gridDim.y, Warpgroups * kWgmmaQueryRows);
  const int block_first = run.block_first, kv_head = blockIdx.x;
  const int kv_len = c.kv_len[run.sequence()];
  // The row's query, or the last one's for rows behind the last.
  const auto query_of = [&](int row) { return run.query_of(min(row, run.rows() - 1)); };
  // The first key that a row sees.
  [[maybe_unused]] const auto first_key = [&](int row) {
    const int sees = run.sees(kv_len);
    if constexpr (has_window)
      return sees ? run.first_key(sees + query_of(row)) : 0;
    else
      return 0;
  };
  const int begin = first_key(block_first) / kWgmmaKeys;  // the block's first tile
  // The tiles up to the last one that rows up to this one see. A block copies its first tile in any case, without a
  // window before kv_len is there.
  const auto tiles_up_to = [&](int row) {
    const int sees = run.sees(kv_len);  // keys that query 0 sees; query i sees i more
    return sees ? (sees + query_of(row) + kWgmmaKeys - 1) / kWgmmaKeys : 0;
  };
  const auto last_tile = [&] { return max(tiles_up_to(block_first + Warpgroups * kWgmmaQueryRows - 1), 1) - 1; };

  if (warp >= 4 * Warpgroups) {
    give_registers<kWgmmaCopyRegisters>();
    if (has_window && warp == 4 * Warpgroups + 1) {
      // Values before the first key become zeros, as those behind the last one do below.
      if (const int hidden = first_key(block_first) - begin * kWgmmaKeys; hidden > 0) {
        wait_barrier(v_ring.full, 0);
        clear_rows<columns>(v_tiles, 0, hidden);
        __syncwarp();
        if (lane == 0) arrive(zeros_stored + has_window);
      }
    }
    if (warp > 4 * Warpgroups) return;
    if (elected()) {
      const auto copy = [&](unsigned char* to, const CUtensorMap& map, int tile, std::uint64_t* full) {
        const auto [matrix, row] = c.cache.matrix_row(run.sequence(), kv_head, tile * kWgmmaKeys);
        arrive_expecting(full, stage_bytes);
#pragma unroll
        for (int i = 0; i < columns; ++i)
          copy_tensor_tile(to + i * kWgmmaTileBytes, &map, i * kTileColumns, int(row), int(matrix), full);
      };
      RingSlot slot;
      int tile = begin;
      do {
        wait_barrier(k_ring.empty + slot.stage, slot.parity ^ 1);  // at once in the first round
        copy(k_tiles + slot.stage * stage_bytes, k_map, tile, k_ring.full + slot.stage);
        wait_barrier(v_ring.empty + slot.stage, slot.parity ^ 1);
        copy(v_tiles + slot.stage * stage_bytes, v_map, tile, v_ring.full + slot.stage);
        slot.next(stages);
      } while (++tile <= last_tile());
    }
    __syncwarp();
    // Values behind the last key become zeros, because a weight of 0 times NaN would be NaN. Scores of keys behind it
    // are never used.
    const int tile = last_tile(), s = (tile - begin) % stages, valid = kv_len - tile * kWgmmaKeys;
    if (valid > 0 && valid < kWgmmaKeys) {
      wait_barrier(v_ring.full + s, (tile - begin) / stages % 2);
      clear_rows<columns>(v_tiles + s * stage_bytes, valid, kWgmmaKeys);
      __syncwarp();
      if (lane == 0) arrive(zeros_stored);
    }
    return;
  }

  take_registers<wgmma_registers(Warpgroups)>();
  const int own_first = block_first + warp / 4 * kWgmmaQueryRows, warp_first = own_first + warp % 4 * 16;
  const auto row_of = [&](int r) { return warp_first + 8 * r + lane / 4; };
  WarpgroupRows<T, HeadDim> rows;
  load_queries<T, HeadDim, 2>(rows.q, c.head_dim, [&](int r) {
    return row_of(r) < run.rows() ? static_cast<const T*>(c.q) + run.row(kv_head, row_of(r)) : nullptr;
  });
  if constexpr (has_window)
    for (SoftmaxState& state : rows.state) state.max = kLowestScore;
  const int sees = run.sees(kv_len), last = last_tile();
  const int tiles = own_first < run.rows() ? tiles_up_to(own_first + kWgmmaQueryRows - 1) : 0;
  const bool zeros = kv_len < (last + 1) * kWgmmaKeys;
  [[maybe_unused]] const bool hides_keys = first_key(block_first) > begin * kWgmmaKeys;
  const std::uint32_t zero = std::uint32_t(c.heads) >> 31;
  RingSlot k_slot, v_slot;

  const auto start_scores = [&] {
    wait_barrier(k_ring.full + k_slot.stage, k_slot.parity);
    rows.start_scores(k_tiles + k_slot.stage * stage_bytes);
  };
  const auto weigh_scores = [&](int tile) {
    rows.end_scores();
    if (lane == 0) arrive(k_ring.empty + k_slot.stage);
    k_slot.next(stages);
    const int first = tile * kWgmmaKeys;
    // `masked` is the same in all warps of the warpgroup, for the reason that rescale_values() gives.
    const bool masked = first + kWgmmaKeys > sees + run.query_of(own_first);
    const auto visible = [&](int r) { return sees + query_of(row_of(r)) - first; };
    if constexpr (has_window) {
      const bool hides = first < first_key(own_first + kWgmmaQueryRows - 1);
      return rows.weigh_scores(c.scale, masked || hides, visible, [&](int r) { return first_key(row_of(r)) - first; });
    } else {
      return rows.weigh_scores(c.scale, masked, visible, nullptr);
    }
  };
  const auto start_values = [&](int tile) {
    wait_barrier(v_ring.full + v_slot.stage, v_slot.parity);
    if (tile == last && zeros) wait_barrier(zeros_stored, 0);
    if (has_window && tile == begin && hides_keys) wait_barrier(zeros_stored + has_window, 0);
    rows.start_values(v_tiles + v_slot.stage * stage_bytes);
  };
  const auto release_values = [&] {
    if (lane == 0) arrive(v_ring.empty + v_slot.stage);
    v_slot.next(stages);
  };

  if (tiles > begin) {
    start_scores();
    wgmma_wait<0>();
    rows.set_weights(weigh_scores(begin), zero);
#pragma unroll 1
    for (int tile = begin + 1; tile < tiles; ++tile) {
      start_scores();
      start_values(tile - 1);
      wgmma_wait<1>();
      const auto next = weigh_scores(tile);
      rows.rescale_values();
      release_values();
      rows.set_weights(next, zero);
    }
    start_values(tiles - 1);
    wgmma_wait<0>();
    rows.end_values();
    release_values();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    rows.store(r, c.head_dim, row_of(r) < run.rows() ? static_cast<T*>(c.y) + run.row(kv_head, row_of(r)) : nullptr);
  // The tiles that only the block's other rows see are not read, but waited for: no copy outlives the block, and the
  // barriers' phases keep their order.
  for (int tile = has_window ? max(tiles, begin) : tiles; tile <= last; ++tile) {
    wait_barrier(k_ring.full + k_slot.stage, k_slot.parity);
    if (lane == 0) arrive(k_ring.empty + k_slot.stage);
    k_slot.next(stages);
    wait_barrier(v_ring.full + v_slot.stage, v_slot.parity);
    if (lane == 0) arrive(v_ring.empty + v_slot.stage);
    v_slot.next(stages);
  }
#endif
}

/// The kernel for a padded head_dim.
template <class T, class Call>
auto wgmma_kernel_for(int padded, int warpgroups) {
  switch (padded) {
    case 64: return warpgroups > 1 ? wgmma_prefill_kernel<T, 64, 2, Call> : wgmma_prefill_kernel<T, 64, 1, Call>;
    case 80: return warpgroups > 1 ? wgmma_prefill_kernel<T, 80, 2, Call> : wgmma_prefill_kernel<T, 80, 1, Call>;
    default: return warpgroups > 1 ? wgmma_prefill_kernel<T, 128, 2, Call> : wgmma_prefill_kernel<T, 128, 1, Call>;
  }
}

/// The map of a tensor of keys or of values for tiles of kWgmmaKeys.
template <class Call>
Status make_cache_map(const ConstAnyView<4>& storage, const Call& c, CUtensorMap& map) {
  return make_tensor_map({.data = storage.data,
                          .dtype = storage.dtype,
                          .columns = c.head_dim,
                          .rows = c.cache.matrix_rows(),
                          .matrices = c.cache.matrices(storage.shape[0])},
                         kWgmmaKeys, map);
}

/// Adds a launch over `blocks` blocks of rows of a kv head in `slices` slices.
template <class Call>
Status launch_wgmma_prefill(const ops::Attention::Args& a, const Call& c, int warpgroups, int smem_bytes, int blocks,
                            std::int64_t slices, LaunchList& launches) {
  CUtensorMap k_map, v_map;
  CF_TRY(make_cache_map(a.k_cache, c, k_map));
  CF_TRY(make_cache_map(a.v_cache, c, v_map));
  const LaunchShape shape{.grid = dim3(unsigned(c.cache.heads()), unsigned(blocks), unsigned(slices)),
                          .block = unsigned(wgmma_threads(warpgroups)),
                          .smem_bytes = std::size_t(smem_bytes)};
  const int padded = padded_head_dim(c.head_dim);
  return launch(ops::Attention::name, launches, shape,
                a.q.dtype == DType::f16 ? wgmma_kernel_for<f16, Call>(padded, warpgroups)
                                        : wgmma_kernel_for<bf16, Call>(padded, warpgroups),
                c, k_map, v_map);
}

}  // namespace cf::cuda
