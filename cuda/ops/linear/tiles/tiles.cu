#include "cuda/ops/linear/tiles/tiles.hpp"

#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/output.cuh"
#include "cuda/ops/linear/wgmma/ring.cuh"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace cf::cuda {
namespace {

/// A warp of the last warpgroup starts the copies. That warpgroup gives most of its registers to the others.
constexpr int kConsumers = 32 * kLinearTilesWarps, kThreads = kConsumers + 128;
constexpr int kCopyRegisters = 24, kRegisters = 240;
static_assert(128 * kCopyRegisters + kConsumers * kRegisters <= kH200.registers_per_sm);

template <bool InTurn>
constexpr LinearTilesShape shape_of = InTurn ? kLinearTilesInTurn : kLinearTilesShared;

struct TilesCall {
  LinearOutput output;
  int tokens, steps;
  int token_groups, groups, clusters;
};

// Other devices' code has no use for what follows.
#ifdef CF_HAVE_WGMMA
/// The first token and the first feature of a block's tile in a group.
template <bool InTurn>
struct Tile {
  int token, feature;
  __device__ Tile(const TilesCall& c, int group, int rank) {
    constexpr LinearTilesShape shape = shape_of<InTurn>;
    token = (group % c.token_groups * shape.token_blocks() + rank % shape.token_blocks()) * kLinearTilesTokenRows;
    feature = (group / c.token_groups * shape.feature_blocks() + rank % shape.feature_blocks()) * shape.width;
  }
};

/// One lane issues the TMA copies of a block's tiles. What both blocks of a cluster need is multicast: each block loads
/// one half for both. The first weight tiles are requested before the wait for the previous kernel, x after it.
template <bool InTurn>
__device__ void copy_tiles(const WgmmaRing<shape_of<InTurn>.width>& ring, const TilesCall& c, int rank, int first_group,
                           const CUtensorMap& weight, const CUtensorMap& x) {
  constexpr LinearTilesShape shape = shape_of<InTurn>;
  constexpr int x_rows = kLinearTilesTokenRows / shape.feature_blocks(),
                weight_rows = shape.width / shape.token_blocks();
  const int x_row = rank % shape.feature_blocks() * x_rows, weight_row = rank % shape.token_blocks() * weight_rows;
  const auto copy = [&](bool shared, unsigned char* to, const CUtensorMap& map, int i, int row, int stage) {
    constexpr std::uint16_t both = 3;
    if (shared)
      copy_tensor_tile_to(both, to, &map, i * kLinearWgmmaColumns, row, 0, ring.full + stage);
    else
      copy_tensor_tile(to, &map, i * kLinearWgmmaColumns, row, 0, ring.full + stage);
  };
  const auto copy_weight = [&](const Tile<InTurn>& tile, int i, int stage) {
    arrive_expecting(ring.full + stage, ring.stage_bytes);
    copy(!InTurn, ring.b(stage) + weight_row * kTileRowBytes, weight, i, tile.feature + weight_row, stage);
  };
  const auto copy_x = [&](const Tile<InTurn>& tile, int i, int stage) {
    copy(InTurn, ring.a(stage) + x_row * kTileRowBytes, x, i, tile.token + x_row, stage);
  };
  const int ahead = min(c.steps, ring.stages);
  const Tile<InTurn> first_tile(c, first_group, rank);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_weight(first_tile, i, i);
  wait_for_predecessors();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_x(first_tile, i, i);
  RingSlot slot;
  slot.skip(ahead, ring.stages);
#pragma unroll 1
  for (int group = first_group, i = ahead; group < c.groups; group += c.clusters, i = 0) {
    const Tile<InTurn> tile(c, group, rank);
#pragma unroll 1
    for (; i < c.steps; ++i, slot.next(ring.stages)) {
      wait_barrier(ring.empty + slot.stage, slot.parity ^ 1);  // at once in the first round
      copy_weight(tile, i, slot.stage);
      copy_x(tile, i, slot.stage);
    }
  }
  // A block stays until the other has arrived at its barriers for the last time.
#pragma unroll 1
  for (int i = 0; i < ring.stages; ++i, slot.next(ring.stages)) wait_barrier(ring.empty + slot.stage, slot.parity ^ 1);
}

/// Tells both blocks of the cluster that a warp is done with a stage, since both copy to it. One lane tells one block.
struct Release {
  bool tells;
  std::uint32_t empty;  // the first stage's barrier there

  __device__ explicit Release(const std::uint64_t* empty_here) {
    const int lane = threadIdx.x % 32;
    tells = lane < kLinearTilesBlocks;
    empty = tells ? shared_address_in(lane, empty_here) : 0;
  }
  __device__ void operator()(int stage) const {
    if (tells) arrive_in_cluster(empty + stage * int(sizeof(std::uint64_t)));
  }
};

/// A warpgroup's sums of a tile over the block's steps, for 64 * Blocks tokens from row `first_row` of the tile on.
/// started() is called when the last products have been started.
template <class T, int Width, int Blocks, class Started>
__device__ void multiply_tile(const WgmmaRing<Width>& ring, int steps, int first_row, RingSlot& slot,
                              const Release& release, Started started, float (&sum)[Blocks][Width / 2]) {
  int last_stage = 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i, slot.next(ring.stages)) {
    wait_barrier(ring.full + slot.stage, slot.parity);
    const std::uint64_t a = tile_along_k(ring.a(slot.stage) + first_row * kTileRowBytes),
                        b = tile_along_k(ring.b(slot.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLinearWgmmaColumns / 16; ++k)
#pragma unroll
      for (int block = 0; block < Blocks; ++block)
        wgmma(sum[block], a + block * (64 * kTileRowBytes >> 4) + k * kWgmmaStep, b + k * kWgmmaStep, i + k > 0, T{});
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0) release(last_stage);
    last_stage = slot.stage;
  }
  started();
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < Blocks; ++block) keep_in_registers(sum[block]);
  release(last_stage);
}

/// The offset of a sum in a chunk, in floats. In the order that the features of a row have, wgmma()'s lanes and the
/// lanes that finish rows use every bank once: the latter are two rows of four, i and i + 4, at a time.
__device__ int offset_in_chunk(int row, int feature) {
  return row * kLinearTilesChunk + (feature ^ 4 * (row % 4 * 2 + row / 4 % 2));
}

/// v = the eight sums at a row and feature of a chunk.
__device__ void load_sums(const float* chunk, int row, int feature, float (&v)[kVec]) {
  *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(chunk + offset_in_chunk(row, feature));
  *reinterpret_cast<float4*>(v + 4) = *reinterpret_cast<const float4*>(chunk + offset_in_chunk(row, feature + 4));
}

/// Finishes a warp's sums of 16 tokens and Width features, and of 16 tokens more 64 tokens on where `blocks` is 2. A
/// lane takes eight features of two tokens of a chunk. sums_of(chunk) makes a chunk's sums ready and says where they
/// lie; it is called for all chunks in turn. `bias` lies in shared memory. A loop does the work, for the reason that
/// Parts in wgmma/block.cuh gives.
template <class T, int Width, class SumsOf>
__device__ void finish_chunks(const LinearOutput& to, int tokens, int first_token, int blocks, int first_feature,
                              const float* bias, SumsOf sums_of) {
  constexpr int row_chunks = Width / kLinearTilesChunk;
  const int lane = threadIdx.x % 32, lane_row = lane / 4 % 2 * 4 + lane / 8, lane_feature = lane % 4 * kVec;
#pragma unroll 1
  for (int chunk = 0; chunk < blocks * row_chunks; ++chunk) {
    const int block = chunk >= row_chunks;
    const int feature = (chunk - block * row_chunks) * kLinearTilesChunk + lane_feature;
    const float* const sums = sums_of(chunk);
    float added[kVec], v[2][kVec];
    load_vec(bias + feature, added);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      load_sums(sums, lane_row + 8 * r, lane_feature, v[r]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[r][e] += added[e];
      apply(to.epilogue, v[r]);
      if (const int t = first_token + block * 64 + lane_row + 8 * r; t < tokens && first_feature + feature < to.out)
        store_vec_whole(static_cast<T*>(to.y) + t * to.out + first_feature + feature, v[r]);
    }
  }
}

/// Stores a chunk of a warp's sums.
template <int Width, int Blocks>
__device__ void store_chunk(const float (&sum)[Blocks][Width / 2], int chunk, float* to) {
  constexpr int row_chunks = Width / kLinearTilesChunk, eights = kLinearTilesChunk / 8;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Blocks * row_chunks; ++i)
    if (i == chunk)
#pragma unroll
      for (int j = 0; j < eights; ++j) {
        const float* const from = sum[i / row_chunks] + 4 * (i % row_chunks * eights + j);
        store_pair_shared(to + offset_in_chunk(g, 8 * j + 2 * t), from[0], from[1]);
        store_pair_shared(to + offset_in_chunk(g + 8, 8 * j + 2 * t), from[2], from[3]);
      }
}

/// The named barriers of a block: of a warpgroup, and for the turn of one.
constexpr int kGroupBarrier = 1, kTurnBarrier = 3;

#endif

template <class T, bool InTurn>
__global__ void __launch_bounds__(kThreads, 1)
    linear_tiles_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap weight,
                        [[maybe_unused]] const __grid_constant__ CUtensorMap x,
                        [[maybe_unused]] const __grid_constant__ TilesCall c) {
#ifdef CF_HAVE_WGMMA
  constexpr int width = shape_of<InTurn>.width, stages = linear_tiles_stages(width), blocks = InTurn ? 2 : 1;
  static_assert(width % kLinearTilesChunk == 0);
  extern __shared__ unsigned char smem[];
  __shared__ std::uint64_t full[stages], empty[stages], half_stored;
  __shared__ alignas(16) float bias[2][width];
  static_assert(sizeof full + sizeof empty + sizeof half_stored + sizeof bias <= kLinearTilesStaticBytes);
  const WgmmaRing<width> ring{
      .first = smem + (1024 - shared_address(smem) % 1024) % 1024, .full = full, .empty = empty, .stages = stages};
  const int warp = threadIdx.x / 32, group = warp / 4, rank = cluster_rank();
  if (threadIdx.x == kConsumers) {
    prefetch_map(&weight);
    prefetch_map(&x);
  }
  if (threadIdx.x < stages) {
    init_barrier(full + threadIdx.x, 1);
    init_barrier(empty + threadIdx.x, kLinearTilesWarps / blocks * kLinearTilesBlocks);
    if (threadIdx.x == 0) init_barrier(&half_stored, 128);
    publish_barriers();
  }
  wait_for_cluster();  // the other block's copies count at this block's barriers
  let_successor_start();

  const int first_group = cluster_index();
  if (warp >= kLinearTilesWarps) {
    give_registers<kCopyRegisters>();
    if (warp == kLinearTilesWarps && elected()) copy_tiles<InTurn>(ring, c, rank, first_group, weight, x);
    return;
  }
  take_registers<kRegisters>();
  const Release release(empty);
  const int warp_row = (InTurn ? 0 : group * 64) + warp % 4 * 16;  // of a tile
  float* const chunk_sums =
      reinterpret_cast<float*>(ring.a(stages)) + warp * kLinearTilesChunkFloats;  // behind the ring
  float sum[blocks][width / 2] = {};
  RingSlot slot;
  bool next_is_own = !InTurn || group == 0;
#pragma unroll 1
  for (int i = first_group; i < c.groups; i += c.clusters) {
    const bool is_own = next_is_own, is_last = i + c.clusters >= c.groups;
    if (InTurn) next_is_own = !is_own;
    if (!is_own && !is_last) {
      slot.skip(c.steps, stages);
      continue;
    }
    const Tile<InTurn> tile(c, i, rank);
    if (is_own) {
      named_barrier(kGroupBarrier + group, 128);  // no warp needs the bias before
      for (int f = threadIdx.x % 128; f < width; f += 128)
        bias[group][f] =
            tile.feature + f < c.output.out ? from_bits(bias_bits(c.output, tile.feature + f), c.output.bias_dtype) : 0;
      // A warpgroup waits for every phase of a stage in order: the parity alone does not tell a phase from the next but
      // one.
      if (InTurn && i != first_group) named_barrier(kTurnBarrier + group, kConsumers);
      multiply_tile<T, width, blocks>(
          ring, c.steps, InTurn ? 0 : group * 64, slot, release,
          [&] {
            if (InTurn && !is_last) arrive_at_named_barrier(kTurnBarrier + 1 - group, kConsumers);
          },
          sum);
      named_barrier(kGroupBarrier + group, 128);
    }
    wait_for_predecessors();
    // No products hide the epilogue of the last tile, so the other warpgroup takes half of it. The sums lie where the
    // ring was.
    constexpr int row_chunks = width / kLinearTilesChunk;
    float* const half = reinterpret_cast<float*>(ring.first) + warp % 4 * row_chunks * kLinearTilesChunkFloats;
    if (InTurn && is_last) {
      if (is_own) {
#pragma unroll
        for (int chunk = 0; chunk < row_chunks; ++chunk)
          store_chunk<width, blocks>(sum, row_chunks + chunk, half + chunk * kLinearTilesChunkFloats);
        arrive(&half_stored);
      } else {
        wait_barrier(&half_stored, 0);
      }
    }
    finish_chunks<T, width>(c.output, c.tokens, tile.token + warp_row + (is_own ? 0 : 64),
                            InTurn && is_last ? 1 : blocks, tile.feature, bias[is_own ? group : 1 - group],
                            [&](int chunk) -> const float* {
                              if (!is_own) return half + chunk * kLinearTilesChunkFloats;
                              __syncwarp();
                              store_chunk<width, blocks>(sum, chunk, chunk_sums);
                              __syncwarp();
                              return chunk_sums;
                            });
  }
#endif
}

}  // namespace

Status launch_tiles(const ops::Linear::Args& a, const LinearTilesPlan& plan, LaunchList& launches) {
  const auto& dense = std::get<DenseWeight>(a.linear.weight);
  const auto d = ops::Linear::dims(a);
  const DType dtype = a.x.dtype;
  CUtensorMap weight, x;
  CF_TRY(make_tensor_map({.data = dense.weight.data, .dtype = dtype, .columns = d.in, .rows = d.out},
                         plan.shape.width / plan.shape.token_blocks(), weight));
  CF_TRY(make_tensor_map({.data = a.x.data, .dtype = dtype, .columns = d.in, .rows = d.tokens},
                         kLinearTilesTokenRows / plan.shape.feature_blocks(), x));
  const TilesCall c{.output = linear_output(a),
                    .tokens = int(d.tokens),
                    .steps = int((d.in + kLinearWgmmaColumns - 1) / kLinearWgmmaColumns),
                    .token_groups = plan.token_groups,
                    .groups = plan.groups(),
                    .clusters = plan.clusters};
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::Linear::name, launches,
                  {.grid = unsigned(plan.clusters * kLinearTilesBlocks),
                   .block = kThreads,
                   .smem_bytes = std::size_t(plan.smem_bytes),
                   .cluster_blocks = kLinearTilesBlocks},
                  plan.shape.in_turn ? linear_tiles_kernel<T, true> : linear_tiles_kernel<T, false>, weight, x, c);
  };
  return dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
