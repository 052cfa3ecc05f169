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
  int halves;         // of the columns
  bool side_by_side;  // the halves are two blocks'
  float4* parked;     // each warp's sums of a first half, where the halves are made in turn
};

#ifdef CF_HAVE_WGMMA
/// A block's part of its cluster's work: its tile's number in a group of tiles, and its halves of the columns, from
/// first_half on.
struct Part {
  int tile, first_half, halves, columns_steps, all_halves;
  __device__ explicit Part(const PackedTilesCall& c) : columns_steps(c.weight.matrix.chunks), all_halves(c.halves) {
    // Not cluster_rank(): of blockIdx the compiler knows that all lanes have it.
    const int rank = int(blockIdx.x) % (kPackedTilesBlocks * (c.side_by_side ? 2 : 1));
    tile = rank % kPackedTilesBlocks, first_half = rank / kPackedTilesBlocks;
    halves = c.side_by_side ? 1 : c.halves;
  }
  /// Where half h of the columns begins, in steps; that of h = all halves is the end.
  __device__ int step(int h) const { return h == all_halves ? columns_steps : columns_steps / 2 * h; }
  __device__ int first_step() const { return step(first_half); }
  __device__ int steps() const { return step(first_half + halves) - first_step(); }
  /// The first of the cluster's blocks that share this block's copies of x.
  __device__ int first_rank() const { return first_half * kPackedTilesBlocks; }
};

/// The first token and the first row of a block's tile in a group.
struct Tile {
  int token, row;
  __device__ Tile(const PackedTilesCall& c, int tokens, int group, const Part& at)
      : token(group % c.token_groups * tokens),
        row((group / c.token_groups * kPackedTilesBlocks + at.tile) * kLinearWgmmaTileRows) {}
};

/// One lane starts the copies of a block's tiles. Each block loads a part of x for the blocks of its columns. The first
/// weights are requested before the wait for the previous kernel, x after it.
template <int Tokens>
__device__ void copy_tiles(const PackedRing<Tokens>& ring, const PackedTilesCall& c, const Part& at, int first_group,
                           const CUtensorMap& x, const CUtensorMap& codes, const CUtensorMap& scales) {
  constexpr int x_rows = Tokens / kPackedTilesBlocks;
  static_assert(x_rows % 8 == 0);  // a part of a tile in shared memory begins at a multiple of 1024 bytes
  const int first_step = at.first_step(), steps = at.steps();
  const auto copy_weight = [&](const Tile& tile, int i, int stage) {
    arrive_expecting(ring.full + stage, ring.stage_bytes);
    copy_packed(ring.a(stage), codes, scales, c.weight.halves_a_group, tile.row / kGptqRows, first_step + i,
                ring.full + stage);
  };
  const auto copy_x = [&](const Tile& tile, int i, int stage) {
    const auto ranks = std::uint16_t((1 << kPackedTilesBlocks) - 1 << at.first_rank());
    copy_tensor_tile_to(ranks, ring.b(stage) + at.tile * x_rows * kTileRowBytes, &x,
                        (first_step + i) * kLinearWgmmaColumns, tile.token + at.tile * x_rows, 0, ring.full + stage);
  };
  const int ahead = min(steps, ring.stages);
  const Tile first_tile(c, Tokens, first_group, at);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_weight(first_tile, i, i);
  wait_for_predecessors();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_x(first_tile, i, i);
  RingSlot slot;
  slot.skip(ahead, ring.stages);
#pragma unroll 1
  for (int group = first_group, i = ahead; group < c.groups; group += c.clusters, i = 0) {
    const Tile tile(c, Tokens, group, at);
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

/// Stores a warp's sums of the first half of the columns in scratch memory, and later adds them to those of the second.
template <int Tokens>
class ParkedSums {
 public:
  __device__ explicit ParkedSums(const PackedTilesCall& c)
      : at_(c.parked + (long(blockIdx.x) * kConsumers + threadIdx.x / 32 * 32) * (Tokens / 8) + threadIdx.x % 32) {}
  __device__ void park(const float (&sum)[Tokens / 2]) const {
#pragma unroll
    for (int i = 0; i < Tokens / 8; ++i)
      at_[32 * i] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  }
  __device__ void add_to(float (&sum)[Tokens / 2]) const {
#pragma unroll
    for (int i = 0; i < Tokens / 8; ++i) {
      const float4 v = at_[32 * i];
      sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
    }
  }

 private:
  float4* at_;  // a lane reads what it has written itself
};

/// Adds up the sums of two blocks, each of which has a half of the columns. Block i % 2 finishes chunk i of a warp's
/// sums: the other block's warp sends its part there. A sum of two has the same bits in either order. A block's inbox
/// has a barrier for what arrives, and one in the sender's memory that says that the inbox is free again. Warps do not
/// have barriers of their own: behind a wait for those the compiler would no longer know that a warp's lanes are together.
template <int Tokens>
class SentSums {
 public:
  __device__ SentSums(const Part& at, float* inboxes, std::uint64_t* arrived, std::uint64_t* may_send)
      : own_(at.first_half),
        other_rank_((1 - at.first_half) * kPackedTilesBlocks + at.tile),
        inbox_(inboxes + threadIdx.x / 32 * kFloats),
        arrived_(arrived),
        may_send_(may_send) {}

  /// Of the block's tiles this is an even one, 0, or an odd one, 1. is_last: the block has no further tile.
  __device__ void add_to(float (&sum)[Tokens / 2], int parity, bool is_last) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) arrive_expecting(arrived_, kFloats * 4);
    wait_barrier(may_send_, parity ^ 1);  // at once for the first tile
    const std::uint32_t to = shared_address_in(other_rank_, inbox_ + lane * 4);
    const std::uint32_t arrived_there = shared_address_in(other_rank_, arrived_);
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (i % 2 != own_)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const v = sum + 8 * i + 4 * half;
          store_async(to + (i / 2 * 2 + half) * 32 * 16, {v[0], v[1], v[2], v[3]}, arrived_there);
        }
    wait_cluster_barrier(arrived_, parity);
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (i % 2 == own_)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 v = *reinterpret_cast<const float4*>(inbox_ + ((i / 2 * 2 + half) * 32 + lane) * 4);
          float* const of = sum + 8 * i + 4 * half;
          of[0] += v.x, of[1] += v.y, of[2] += v.z, of[3] += v.w;
        }
    __syncwarp();  // all lanes have read the inbox
    if (lane == 0 && !is_last) arrive_in_cluster(shared_address_in(other_rank_, may_send_));
  }

 private:
  static constexpr int kChunks = Tokens / kPackedTilesChunk;
  static constexpr int kFloats = packed_tiles_inbox_bytes(Tokens) / kLinearWgmmaWarps / 4;  // of a warp
  static_assert(kChunks % 2 == 0);
  int own_, other_rank_;
  float* inbox_;
  std::uint64_t *arrived_, *may_send_;
};

/// Finishes a warp's sums of 16 rows, from `row` on, in chunks of tokens that go through shared memory: a lane then has
/// eight rows of a token. With halves side by side a block finishes every second chunk. A loop does the work, for the
/// reason that Parts in wgmma/block.cuh gives.
template <class T, int Tokens, bool Gated>
__device__ void finish_tile(const PackedTilesCall& c, const Part& at, int first_token, int row, float* chunk,
                            const float (&sum)[Tokens / 2]) {
  constexpr int pitch = kLinearWgmmaPartPitch, sums = kPackedTilesChunk / 2;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int of_token = lane % kPackedTilesChunk, of_row = lane / kPackedTilesChunk * kVec;
  const bool has_rows = row + of_row < c.output.out * (Gated ? 2 : 1);
  const OutputRows rows(c, has_rows ? row + of_row : 0);
#pragma unroll 1
  for (int i = at.first_half; i < Tokens / kPackedTilesChunk; i += c.side_by_side ? 2 : 1) {
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
    finish_eight<T, Gated>(c, token, row + of_row, rows, v);
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
  __shared__ std::uint64_t full[stages], empty[stages], arrived, may_send;
  static_assert(sizeof full + sizeof empty + sizeof arrived + sizeof may_send <= kPackedTilesStaticBytes);
  static_assert(PackedRing<Tokens>::stage_bytes == packed_tiles_stage_bytes(Tokens));
  const PackedRing<Tokens> ring{
      .first = smem + (1024 - shared_address(smem) % 1024) % 1024, .full = full, .empty = empty, .stages = stages};
  const int warp = threadIdx.x / 32;
  const Part at(c);
  if (threadIdx.x == kConsumers)
    for (const CUtensorMap* map : {&x, &codes, &scales}) prefetch_map(map);
  if (threadIdx.x < stages) {
    init_barrier(full + threadIdx.x, 1);
    init_barrier(empty + threadIdx.x, kLinearWgmmaWarps * kPackedTilesBlocks);
    publish_barriers();
  } else if (threadIdx.x == 32) {
    init_barrier(&arrived, kLinearWgmmaWarps);
    init_barrier(&may_send, kLinearWgmmaWarps);
    publish_barriers();
  }
  wait_for_cluster();  // the other blocks' copies count at this block's barriers
  let_successor_start();

  const int first_group = cluster_index();
  if (warp >= kLinearWgmmaWarps) {
    give_registers<kCopyRegisters>();
    if (warp == kLinearWgmmaWarps && elected()) copy_tiles(ring, c, at, first_group, x, codes, scales);
    return;
  }
  take_registers<kRegisters>();
  // A lane tells a block that the warp is done with a stage: all blocks of the same columns copy to it.
  const int lane = threadIdx.x % 32;
  const bool tells = lane < kPackedTilesBlocks;
  const std::uint32_t empty_there = tells ? shared_address_in(at.first_rank() + lane, empty) : 0;
  float* const inboxes = reinterpret_cast<float*>(ring.a(stages));
  float* const chunk = inboxes + packed_tiles_inbox_bytes(Tokens) / 4 + warp * kPackedTilesChunkFloats;
  RingSlot slot;
#pragma unroll 1
  for (int group = first_group, turn = 0; group < c.groups; group += c.clusters, ++turn) {
    const Tile tile(c, Tokens, group, at);
    const int row = tile.row + warp * kGptqRows;
#pragma unroll 1
    for (int half = 0; half < at.halves; ++half) {
      float sum[Tokens / 2] = {};
      const int first_step = at.step(at.first_half + half);
      multiply_codes<T, Tokens, Halves, stages, true>(
          ring, slot, first_step, at.step(at.first_half + half + 1) - first_step, c.weight.halves_a_group,
          [&](int stage) {
            __syncwarp();  // all lanes have read the codes
            if (tells) arrive_in_cluster(empty_there + stage * int(sizeof(std::uint64_t)));
          },
          sum);
      if (half + 1 < at.halves) {
        ParkedSums<Tokens>(c).park(sum);
        continue;
      }
      if (half > 0) ParkedSums<Tokens>(c).add_to(sum);
      if (c.side_by_side)
        SentSums<Tokens>(at, inboxes, &arrived, &may_send).add_to(sum, turn % 2, group + c.clusters >= c.groups);
      wait_for_predecessors();
      if (c.output.epilogue == ops::Epilogue::swiglu)
        finish_tile<T, Tokens, true>(c, at, tile.token, row, chunk, sum);
      else
        finish_tile<T, Tokens, false>(c, at, tile.token, row, chunk, sum);
    }
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
  float4* parked = nullptr;
  if (plan.parked_bytes()) {
    launches.use_scratch();
    parked = reinterpret_cast<float4*>(static_cast<std::byte*>(launches.scratch().data) + plan.parked_at());
  }
  const PackedTilesCall c{.output = linear_output(a),
                          .weight = weight,
                          .tokens = int(a.x.shape[0]),
                          .token_groups = plan.token_groups,
                          .groups = plan.groups(),
                          .clusters = plan.clusters,
                          .halves = plan.halves,
                          .side_by_side = plan.side_by_side,
                          .parked = parked};
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::Linear::name, launches,
                  {.grid = unsigned(plan.clusters * plan.cluster_blocks()),
                   .block = kThreads,
                   .smem_bytes = std::size_t(packed_tiles_smem_bytes(plan.token_tile)),
                   .cluster_blocks = plan.cluster_blocks()},
                  kernel_for<T>(plan.token_tile, weight.halves_a_group % 2 == 0), map, maps.codes, maps.scales, c);
  };
  return dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
