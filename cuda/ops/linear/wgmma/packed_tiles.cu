#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/output.cuh"
#include "cuda/ops/linear/wgmma/codes.cuh"
#include "cuda/ops/linear/wgmma/packed_call.hpp"
#include "cuda/ops/linear/wgmma/wgmma.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A warp of the last warpgroup starts the copies. That warpgroup gives most of its registers to the others.
constexpr int kConsumers = 32 * kLinearWgmmaWarps, kThreads = kConsumers + 128;
constexpr int kCopyRegisters = 24, kRegisters = 240;
static_assert(128 * kCopyRegisters + kConsumers * kRegisters <= kH200.registers_per_sm);

struct PackedTilesCall {
  LinearOutput output;
  PackedOperand weight;
  int tokens;
  int token_groups, groups, clusters;
};

#ifdef CF_HAVE_WGMMA
/// The first token and the first row of a block's tile in a group.
struct Tile {
  int token, row;
  __device__ Tile(const PackedTilesCall& c, int tokens, int group, int rank)
      : token(group % c.token_groups * tokens),
        row((group / c.token_groups * kPackedTilesBlocks + rank) * kLinearWgmmaTileRows) {}
};

/// One lane starts the copies of a block's tiles. Each block loads a part of x for all blocks of its cluster. The first
/// weights are requested before the wait for the previous kernel, x after it.
template <int Tokens>
__device__ void copy_tiles(const PackedRing<Tokens>& ring, const PackedTilesCall& c, int rank, int first_group,
                           const CUtensorMap& x, const CUtensorMap& codes, const CUtensorMap& scales) {
  constexpr int x_rows = Tokens / kPackedTilesBlocks;
  static_assert(x_rows % 8 == 0);  // a part of a tile in shared memory begins at a multiple of 1024 bytes
  const int steps = c.weight.matrix.chunks;
  const auto copy_weight = [&](const Tile& tile, int i, int stage) {
    arrive_expecting(ring.full + stage, ring.stage_bytes);
    copy_packed(ring.a(stage), codes, scales, c.weight.halves_a_group, tile.row / kGptqRows, i, ring.full + stage);
  };
  const auto copy_x = [&](const Tile& tile, int i, int stage) {
    constexpr std::uint16_t all = (1 << kPackedTilesBlocks) - 1;
    copy_tensor_tile_to(all, ring.b(stage) + rank * x_rows * kTileRowBytes, &x, i * kLinearWgmmaColumns,
                        tile.token + rank * x_rows, 0, ring.full + stage);
  };
  const int ahead = min(steps, ring.stages);
  const Tile first_tile(c, Tokens, first_group, rank);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_weight(first_tile, i, i);
  wait_for_predecessors();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_x(first_tile, i, i);
  RingSlot slot;
  slot.skip(ahead, ring.stages);
#pragma unroll 1
  for (int group = first_group, i = ahead; group < c.groups; group += c.clusters, i = 0) {
    const Tile tile(c, Tokens, group, rank);
#pragma unroll 1
    for (; i < steps; ++i, slot.next(ring.stages)) {
      wait_barrier(ring.empty + slot.stage, slot.parity ^ 1);  // at once in the first round
      copy_weight(tile, i, slot.stage);
      copy_x(tile, i, slot.stage);
    }
  }
  // A block stays until the others have arrived at its barriers for the last time.
#pragma unroll 1
  for (int i = 0; i < ring.stages; ++i, slot.next(ring.stages)) wait_barrier(ring.empty + slot.stage, slot.parity ^ 1);
}

/// Where eight packed rows lie in the output: beside each other; as two runs of four, the first and the second elements
/// of pairs that RoPE turns; or apart. Also their biases.
struct OutputRows {
  int rows[kVec];
  float bias[kVec];
  bool in_order = true, in_halves;

  __device__ OutputRows(const PackedTilesCall& c, int first) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      rows[e] = c.weight.pairs.row(first + e);
      in_order = in_order && rows[e] == first + e;
    }
    in_halves = rows[0] % (kVec / 2) == 0 && rows[1] % (kVec / 2) == 0;
#pragma unroll
    for (int e = 2; e < kVec; ++e) in_halves = in_halves && rows[e] == rows[e % 2] + e / 2;
    if (!c.output.bias) return;
    if (in_order)
      load_vec(c.output.bias, c.output.bias_dtype, first, bias);
    else
#pragma unroll
      for (int e = 0; e < kVec; ++e) bias[e] = from_bits(bias_bits(c.output, rows[e]), c.output.bias_dtype);
  }

  /// Stores the rows of a token, y.
  template <class T>
  __device__ void store(T* y, const float (&v)[kVec]) const {
    if (in_order) {
      store_vec_whole(y + rows[0], v);
    } else if (in_halves) {
      const float first[] = {v[0], v[2], v[4], v[6]}, second[] = {v[1], v[3], v[5], v[7]};
      store_few(y + rows[0], first);
      store_few(y + rows[1], second);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[rows[e]] = from_float<T>(v[e]);
    }
  }
};

/// Finishes eight rows of a token. `row` is the first of them, as the matrix is packed.
template <class T, bool Gated>
__device__ void finish_eight(const PackedTilesCall& c, int token, int row, const OutputRows& at, float (&v)[kVec]) {
  const LinearOutput& to = c.output;
  if (to.bias)
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] += at.bias[e];
  if constexpr (Gated) {
    float of_pairs[kVec / 2];
    apply_gates(v, of_pairs);
    store_few(static_cast<T*>(to.y) + token * to.out + row / 2, of_pairs);
  } else {
    if (to.residual) {
      float added[kVec];
      load_vec(static_cast<const T*>(to.residual) + token * to.out + row, added);
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] += added[e];
    }
    apply(to.epilogue, v);
    at.store(static_cast<T*>(to.y) + token * to.out, v);
  }
}

/// Finishes a warp's sums of 16 rows, from `row` on, in chunks of tokens that go through shared memory: a lane then has
/// eight rows of a token. A loop does the work, for the reason that Parts in wgmma/block.cuh gives.
template <class T, int Tokens, bool Gated>
__device__ void finish_tile(const PackedTilesCall& c, int first_token, int row, float* chunk,
                            const float (&sum)[Tokens / 2]) {
  constexpr int pitch = kLinearWgmmaPartPitch, sums = kPackedTilesChunk / 2;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int of_token = lane % kPackedTilesChunk, of_row = lane / kPackedTilesChunk * kVec;
  const bool has_rows = row + of_row < c.output.out * (Gated ? 2 : 1);
  const OutputRows at(c, has_rows ? row + of_row : 0);
#pragma unroll 1
  for (int i = 0; i < Tokens / kPackedTilesChunk; ++i) {
    __syncwarp();  // the chunk before is read
#pragma unroll
    for (int j = 0; j < Tokens / kPackedTilesChunk; ++j)
      if (j == i)
#pragma unroll
        for (int s = 0; s < sums; ++s)
          chunk[(s / 4 * 8 + 2 * t + s % 2) * pitch + s % 4 / 2 * 8 + g] = sum[j * sums + s];
    __syncwarp();
    const int token = first_token + i * kPackedTilesChunk + of_token;
    if (token >= c.tokens || !has_rows) continue;
    float v[kVec];
    load_vec(chunk + of_token * pitch + of_row, v);
    finish_eight<T, Gated>(c, token, row + of_row, at, v);
  }
}
#endif

template <class T, int Tokens, int Halves>
__global__ void __launch_bounds__(kThreads, 1)
    linear_packed_tiles_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap x,
                               [[maybe_unused]] const __grid_constant__ CUtensorMap codes,
                               [[maybe_unused]] const __grid_constant__ CUtensorMap scales,
                               [[maybe_unused]] const __grid_constant__ PackedTilesCall c) {
#ifdef CF_HAVE_WGMMA
  extern __shared__ unsigned char smem[];
  constexpr int stages = packed_tiles_stages(Tokens);
  __shared__ std::uint64_t full[stages], empty[stages];
  static_assert(sizeof full + sizeof empty <= kPackedTilesStaticBytes);
  static_assert(PackedRing<Tokens>::stage_bytes == packed_tiles_stage_bytes(Tokens));
  const PackedRing<Tokens> ring{
      .first = smem + (1024 - shared_address(smem) % 1024) % 1024, .full = full, .empty = empty, .stages = stages};
  const int warp = threadIdx.x / 32, rank = cluster_rank();
  if (threadIdx.x == kConsumers)
    for (const CUtensorMap* map : {&x, &codes, &scales}) prefetch_map(map);
  if (threadIdx.x < stages) {
    init_barrier(full + threadIdx.x, 1);
    init_barrier(empty + threadIdx.x, kLinearWgmmaWarps * kPackedTilesBlocks);
    publish_barriers();
  }
  wait_for_cluster();  // the other blocks' copies count at this block's barriers
  let_successor_start();

  const int first_group = cluster_index();
  if (warp >= kLinearWgmmaWarps) {
    give_registers<kCopyRegisters>();
    if (warp == kLinearWgmmaWarps && elected()) copy_tiles(ring, c, rank, first_group, x, codes, scales);
    return;
  }
  take_registers<kRegisters>();
  // A lane tells one block of the cluster that the warp is done with a stage, since all of them copy to it.
  const int lane = threadIdx.x % 32;
  const bool tells = lane < kPackedTilesBlocks;
  const std::uint32_t empty_there = tells ? shared_address_in(lane, empty) : 0;
  float* const chunk = reinterpret_cast<float*>(ring.a(stages)) + warp * kPackedTilesChunkFloats;
  RingSlot slot;
#pragma unroll 1
  for (int group = first_group; group < c.groups; group += c.clusters) {
    const Tile tile(c, Tokens, group, rank);
    const int row = tile.row + warp * kGptqRows;
    float sum[Tokens / 2] = {};
    multiply_codes<T, Tokens, Halves, stages, true>(
        ring, slot, 0, c.weight.matrix.chunks, c.weight.halves_a_group,
        [&](int stage) {
          __syncwarp();  // all lanes have read the codes
          if (tells) arrive_in_cluster(empty_there + stage * int(sizeof(std::uint64_t)));
        },
        sum);
    wait_for_predecessors();
    if (c.output.epilogue == ops::Epilogue::swiglu)
      finish_tile<T, Tokens, true>(c, tile.token, row, chunk, sum);
    else
      finish_tile<T, Tokens, false>(c, tile.token, row, chunk, sum);
  }
#endif
}

template <class T>
auto kernel_for(int token_tile, bool whole) {
  if (!whole) return token_tile == 64 ? linear_packed_tiles_kernel<T, 64, 1> : linear_packed_tiles_kernel<T, 128, 1>;
  switch (token_tile) {
    case 64: return linear_packed_tiles_kernel<T, 64, 2>;
    case 96: return linear_packed_tiles_kernel<T, 96, 2>;
    case 128: return linear_packed_tiles_kernel<T, 128, 2>;
    case 160: return linear_packed_tiles_kernel<T, 160, 2>;
    case 192: return linear_packed_tiles_kernel<T, 192, 2>;
    default: return linear_packed_tiles_kernel<T, 256, 2>;
  }
}

}  // namespace

Status launch_tiles_packed(const ops::Linear::Args& a, const PackedTilesPlan& plan, LaunchList& launches) {
  const DType dtype = a.x.dtype;
  CF_TRY_ASSIGN(const PackedOperand weight, packed_operand(a));
  CF_TRY_ASSIGN(const PackedInput x, packed_input(a, weight, launches));
  CF_TRY_ASSIGN(const PackedMaps maps, packed_maps(weight.matrix));
  CUtensorMap map;
  CF_TRY(make_tensor_map({.data = x.data, .dtype = dtype, .columns = x.columns, .rows = a.x.shape[0]},
                         plan.token_tile / kPackedTilesBlocks, map));
  const PackedTilesCall c{.output = linear_output(a),
                          .weight = weight,
                          .tokens = int(a.x.shape[0]),
                          .token_groups = plan.token_groups,
                          .groups = plan.groups(),
                          .clusters = plan.clusters};
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::Linear::name, launches,
                  {.grid = unsigned(plan.clusters * kPackedTilesBlocks),
                   .block = kThreads,
                   .smem_bytes = std::size_t(packed_tiles_smem_bytes(plan.token_tile)),
                   .cluster_blocks = kPackedTilesBlocks},
                  kernel_for<T>(plan.token_tile, weight.halves_a_group % 2 == 0), map, maps.codes, maps.scales, c);
  };
  return dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
