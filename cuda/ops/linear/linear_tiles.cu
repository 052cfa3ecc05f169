#include "cuda/ops/linear/linear_tiles.hpp"

#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/ops/linear/linear.cuh"
#include "cuda/ops/linear/linear_wgmma.cuh"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "cuda/runtime/wgmma.hpp"

namespace cf::cuda {
namespace {

/// A warp of the last warpgroup starts the copies. That warpgroup gives most of its registers to the others.
constexpr int kConsumers = 32 * kLinearTilesWarps, kThreads = kConsumers + 128;
constexpr int kCopyRegisters = 24, kRegisters = 240;
static_assert(128 * kCopyRegisters + kConsumers * kRegisters <= kH200.registers_per_sm);

struct TilesCall {
  LinearOutput output;
  int tokens, steps;
  int token_blocks, feature_blocks, splits;  // of a cluster
  int token_groups, groups, clusters;
};

// Other devices' code has no use for what follows.
#ifdef CF_HAVE_WGMMA
/// A block's place in its cluster. Ranks count along the tokens first, then along the features.
struct Member {
  const TilesCall& c;
  int token, feature, split;

  __device__ Member(const TilesCall& c, int rank) : c(c) {
    token = rank % c.token_blocks;
    feature = rank / c.token_blocks % c.feature_blocks;
    split = rank / (c.token_blocks * c.feature_blocks);
  }
  __device__ int rank_of(int token, int feature, int split) const {
    return (split * c.feature_blocks + feature) * c.token_blocks + token;
  }
  /// The blocks that share this block's rows of the weight, one bit a rank; and those that share its tokens.
  __device__ unsigned same_features() const { return ((1u << c.token_blocks) - 1) << rank_of(0, feature, split); }
  __device__ unsigned same_tokens() const {
    unsigned ranks = 0;
    for (int f = 0; f < c.feature_blocks; ++f) ranks |= 1u << rank_of(token, f, split);
    return ranks;
  }
};

/// Where a tile begins.
template <int Width>
struct Tile {
  int token, feature;
  __device__ Tile(const Member& own, int group)
      : token((group % own.c.token_groups * own.c.token_blocks + own.token) * kLinearTilesTokenRows),
        feature((group / own.c.token_groups * own.c.feature_blocks + own.feature) * Width) {}
};

/// Copies the steps of a block's tiles, to this block and to those that share what is copied; one lane calls. The
/// ring's first weights need no predecessor and come before all x.
template <int Width>
__device__ void copy_tiles(const WgmmaRing<Width>& ring, const Member& own, const WgmmaSteps& steps, int first_group,
                           const CUtensorMap& weight, const CUtensorMap& x) {
  const TilesCall& c = own.c;
  const unsigned weight_ranks = own.same_features(), x_ranks = own.same_tokens();
  // The block's pieces.
  const int weight_row = own.token * (Width / c.token_blocks),
            x_row = own.feature * (kLinearTilesTokenRows / c.feature_blocks);
  const auto copy = [&](unsigned ranks, unsigned char* to, const CUtensorMap& map, int i, int row, int stage) {
    const int column = (steps.first + i) * kLinearWgmmaColumns;
    if (ranks & (ranks - 1))
      copy_tensor_tile_to(std::uint16_t(ranks), to, &map, column, row, 0, ring.filled + stage);
    else
      copy_tensor_tile(to, &map, column, row, 0, ring.filled + stage);
  };
  const auto copy_weight = [&](const Tile<Width>& tile, int i, int stage) {
    arrive_expecting(ring.filled + stage, ring.stage_bytes);
    copy(weight_ranks, ring.b(stage) + weight_row * kTileRowBytes, weight, i, tile.feature + weight_row, stage);
  };
  const auto copy_x = [&](const Tile<Width>& tile, int i, int stage) {
    copy(x_ranks, ring.a(stage) + x_row * kTileRowBytes, x, i, tile.token + x_row, stage);
  };
  const int ahead = min(steps.count, ring.stages);
  const Tile<Width> first_tile(own, first_group);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_weight(first_tile, i, i);
  wait_for_predecessors();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_x(first_tile, i, i);
  WgmmaPlace place;
  place.skip(ahead, ring.stages);
#pragma unroll 1
  for (int group = first_group, i = ahead; group < c.groups; group += c.clusters, i = 0) {
    const Tile<Width> tile(own, group);
#pragma unroll 1
    for (; i < steps.count; ++i, place.next(ring.stages)) {
      wait_barrier(ring.free + place.stage, place.parity ^ 1);  // at once in the first round
      copy_weight(tile, i, place.stage);
      copy_x(tile, i, place.stage);
    }
  }
  // A block stays until the others have arrived at its barriers for the last time.
#pragma unroll 1
  for (int i = 0; i < ring.stages; ++i, place.next(ring.stages))
    wait_barrier(ring.free + place.stage, place.parity ^ 1);
}

/// Tells the blocks that copy to this one that a warp is done with a stage. A lane tells a block.
struct Release {
  bool tells;
  std::uint32_t free;  // the first stage's barrier there

  __device__ Release(const Member& own, const std::uint64_t* free_here) {
    const int lane = threadIdx.x % 32, tokens = own.c.token_blocks, feature = lane - tokens;
    tells = lane < tokens + own.c.feature_blocks - 1;
    free = 0;
    if (tells)
      free = shared_address_in(lane < tokens ? own.rank_of(lane, own.feature, own.split)
                                             : own.rank_of(own.token, feature + (feature >= own.feature), own.split),
                               free_here);
  }
  __device__ void operator()(int stage) const {
    if (tells) arrive_in_cluster(free + stage * int(sizeof(std::uint64_t)));
  }
};

/// A warpgroup's sums of a tile over the block's steps, for 64 * Blocks tokens from row `first_row` of the tile on.
/// started() is called when the last products have been started.
template <class T, int Width, int Blocks, class Started>
__device__ void multiply_tile(const WgmmaRing<Width>& ring, int steps, int first_row, WgmmaPlace& place,
                              const Release& release, Started started, float (&sum)[Blocks][Width / 2]) {
  int last_stage = 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i, place.next(ring.stages)) {
    wait_barrier(ring.filled + place.stage, place.parity);
    const std::uint64_t a = tile_along_k(ring.a(place.stage) + first_row * kTileRowBytes),
                        b = tile_along_k(ring.b(place.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLinearWgmmaColumns / 16; ++k)
#pragma unroll
      for (int block = 0; block < Blocks; ++block)
        wgmma(sum[block], a + block * (64 * kTileRowBytes >> 4) + k * kWgmmaStep, b + k * kWgmmaStep, i + k > 0, T{});
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0) release(last_stage);
    last_stage = place.stage;
  }
  started();
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < Blocks; ++block) keep_in_registers(sum[block]);
  release(last_stage);
}

/// The place of a sum in a chunk, in float32. In the order that the features of a row have, wgmma()'s lanes and the
/// lanes that finish rows use every bank once: the latter are two rows of four, i and i + 4, at a time.
__device__ int place_in_chunk(int row, int feature) {
  return row * kLinearTilesChunk + (feature ^ 4 * (row % 4 * 2 + row / 4 % 2));
}

/// Finishes a warp's sums of 16 tokens and `features` features, and of 16 tokens more 64 tokens on where `blocks` is 2.
/// A lane takes eight features of two tokens of a chunk. `bias` lies in shared memory. Loops do the work, for the
/// reason that Parts in linear_wgmma.cu gives.
///   prepare(chunk)                makes the chunk's sums ready; called for all chunks in turn
///   sums(chunk, row, feature, v)  eight sums of a chunk
template <class T, class Prepare, class SumsOf>
__device__ void finish_chunks(const LinearOutput& to, int tokens, int first_token, int blocks, int first_feature,
                              int features, const float* bias, Prepare prepare, SumsOf sums) {
  const int lane = threadIdx.x % 32, lane_row = lane / 4 % 2 * 4 + lane / 8, lane_feature = lane % 4 * kVec;
  const int row_chunks = linear_tiles_chunks(features), chunks = blocks * row_chunks;
  first_token += lane_row;
  first_feature += lane_feature;
  // The lane's tokens of a chunk are token() and token() + 8.
  const auto block = [&](int chunk) { return chunk >= row_chunks; };
  const auto token = [&](int chunk) { return first_token + block(chunk) * 64; };
  const auto feature = [&](int chunk) { return (chunk - block(chunk) * row_chunks) * kLinearTilesChunk; };
  const auto has = [&](int chunk, int token) {
    return token < tokens && feature(chunk) + lane_feature < features && first_feature + feature(chunk) < to.out;
  };
  const auto at = [&](int chunk, int token) { return token * to.out + first_feature + feature(chunk); };
  uint4 ahead[2] = {};  // the next chunk's residual
  const auto load_residual = [&](int chunk) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (const int t = token(chunk) + 8 * r; to.residual && has(chunk, t))
        ahead[r] = load_raw(static_cast<const T*>(to.residual) + at(chunk, t));
  };
  load_residual(0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    uint4 residual[2] = {ahead[0], ahead[1]};
    if (chunk + 1 < chunks) load_residual(chunk + 1);
    prepare(chunk);
#pragma unroll 1
    for (int r = 0; r < 2; ++r, residual[0] = residual[1]) {
      const int t = token(chunk) + 8 * r;
      if (!has(chunk, t)) continue;
      float v[kVec], added[kVec];
      sums(chunk, lane_row + 8 * r, lane_feature, v);
      load_vec(bias + feature(chunk) + lane_feature, added);
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] += added[e];
      if (to.residual) {
        unpack(residual[0], added, T{});
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[e] += added[e];
      }
      apply(to.epilogue, v);
      store_vec(static_cast<T*>(to.y) + at(chunk, t), v);
    }
  }
}

/// v = the eight sums at a row and feature of a chunk.
__device__ void load_sums(const float* chunk, int row, int feature, float (&v)[kVec]) {
  *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(chunk + place_in_chunk(row, feature));
  *reinterpret_cast<float4*>(v + 4) = *reinterpret_cast<const float4*>(chunk + place_in_chunk(row, feature + 4));
}

/// Stores a chunk of a warp's sums.
template <int Width, int Blocks>
__device__ void store_chunk(const float (&sum)[Blocks][Width / 2], int chunk, float* to) {
  constexpr int row_chunks = linear_tiles_chunks(Width), eights = kLinearTilesChunk / 8;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Blocks * row_chunks; ++i)
    if (i == chunk)
#pragma unroll
      for (int j = 0; j < eights; ++j)
        if (const int eight = i % row_chunks * eights + j; eight < Width / 8) {
          const float* const from = sum[i / row_chunks] + 4 * eight;
          *reinterpret_cast<float2*>(to + place_in_chunk(g, 8 * j + 2 * t)) = {from[0], from[1]};
          *reinterpret_cast<float2*>(to + place_in_chunk(g + 8, 8 * j + 2 * t)) = {from[2], from[3]};
        }
}

/// The sums of a tile whose columns are divided, in the place of the ring: for each of the tile's blocks and each warp
/// the chunks of those features that this block finishes.
struct Parts {
  float* first;
  int chunks;  // of a warp

  __device__ float* of(int split, int warp) const {
    return first + (split * kLinearTilesWarps + warp) * chunks * kLinearTilesChunkFloats;
  }
};

/// Sends a warp's sums to the blocks that finish them.
template <int Width>
__device__ void send_sums(const float (&sum)[Width / 2], const Member& own, const ClusterInbox& inbox, float* part) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, eights = Width / 8 / own.c.splits;
  const auto outbox = [&](int split) { return ClusterOutbox(inbox, own.rank_of(own.token, own.feature, split), part); };
  ClusterOutbox out = outbox(0);
  int split = 0, eight = 0;
#pragma unroll
  for (int i = 0; i < Width / 8; ++i, ++eight) {
    if (eight == eights) {
      eight = 0;
      out = outbox(++split);
    }
    const int chunk = eight / 4 * kLinearTilesChunkFloats, feature = eight % 4 * 8 + 2 * t;
    out.send(chunk + place_in_chunk(g, feature), sum[4 * i], sum[4 * i + 1]);
    out.send(chunk + place_in_chunk(g + 8, feature), sum[4 * i + 2], sum[4 * i + 3]);
  }
}

/// The named barriers of a block: of a warpgroup, and for the turn of one.
constexpr int kGroupBarrier = 1, kTurnBarrier = 3;

#endif

template <class T, int Width, bool InTurn>
__global__ void __launch_bounds__(kThreads, 1)
    linear_tiles_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap weight,
                        [[maybe_unused]] const __grid_constant__ CUtensorMap x,
                        [[maybe_unused]] const __grid_constant__ TilesCall c) {
#ifdef CF_HAVE_WGMMA
  constexpr int stages = linear_tiles_stages(Width), blocks = InTurn ? 2 : 1;
  extern __shared__ unsigned char smem[];
  __shared__ std::uint64_t filled[stages], free[stages], arrived;
  __shared__ alignas(16) float bias[2][Width];
  const WgmmaRing<Width> ring{
      .first = smem + (1024 - shared_address(smem) % 1024) % 1024, .filled = filled, .free = free, .stages = stages};
  const int warp = threadIdx.x / 32, group = warp / 4;
  const Member own(c, cluster_rank());
  const bool alone = c.token_blocks * c.feature_blocks * c.splits == 1;
  if (threadIdx.x == kConsumers) {
    prefetch_map(&weight);
    prefetch_map(&x);
  }
  if (threadIdx.x < stages) {
    init_barrier(filled + threadIdx.x, 1);
    init_barrier(free + threadIdx.x, kLinearTilesWarps / blocks * (c.token_blocks + c.feature_blocks - 1));
    publish_barriers();
  }
  // Other blocks' copies count at this block's barriers.
  if (alone)
    __syncthreads();
  else
    wait_for_cluster();
  let_successor_start();

  const int first_group = cluster_index();
  const WgmmaSteps steps(c.steps, c.splits, own.split);
  ClusterInbox inbox(&arrived);
  if (warp >= kLinearTilesWarps) {
    give_registers<kCopyRegisters>();
    if (warp == kLinearTilesWarps && elected()) copy_tiles(ring, own, steps, first_group, weight, x);
    __syncwarp();
    if (c.splits > 1) {
      inbox.open();
      inbox.connect();
    }
  } else {
    take_registers<kRegisters>();
    const Release release(own, free);
    const int warp_row = (InTurn ? 0 : group * 64) + warp % 4 * 16;  // of a tile
    float* const chunk_sums =
        reinterpret_cast<float*>(ring.a(stages)) + warp * kLinearTilesChunkFloats;  // behind the ring
    float sum[blocks][Width / 2] = {};
    WgmmaPlace place;
    bool next_is_own = !InTurn || group == 0;
#pragma unroll 1
    for (int i = first_group; i < c.groups; i += c.clusters) {
      const bool is_own = next_is_own, is_last = i + c.clusters >= c.groups;
      if (InTurn) next_is_own = !is_own;
      if (!is_own && !is_last) {
        place.skip(steps.count, stages);
        continue;
      }
      const Tile<Width> tile(own, i);
      if (is_own) {
        named_barrier(kGroupBarrier + group, 128);  // no warp needs the bias before
        for (int f = threadIdx.x % 128; f < Width; f += 128)
          bias[group][f] = tile.feature + f < c.output.out
                               ? from_bits(bias_bits(c.output, tile.feature + f), c.output.bias_dtype)
                               : 0;
        // A warpgroup waits for a stage's phases in their order: by its parity alone a phase is not told from the next
        // but one.
        if (InTurn && i != first_group) named_barrier(kTurnBarrier + group, kConsumers);
        multiply_tile<T, Width, blocks>(
            ring, steps.count, InTurn ? 0 : group * 64, place, release,
            [&] {
              if (InTurn && !is_last) arrive_at_named_barrier(kTurnBarrier + 1 - group, kConsumers);
            },
            sum);
        named_barrier(kGroupBarrier + group, 128);
      }
      wait_for_predecessors();
      if (!InTurn && c.splits > 1) {
        const int features = Width / c.splits, first_feature = own.split * features;
        const Parts parts{reinterpret_cast<float*>(ring.first), linear_tiles_chunks(features)};
        inbox.open();
        inbox.connect();  // no block reads its ring any more
        send_sums<Width>(sum[0], own, inbox, parts.of(own.split, warp));
        finish_chunks<T>(
            c.output, c.tokens, tile.token + warp_row, 1, tile.feature + first_feature, features,
            bias[group] + first_feature,
            [&](int chunk) {
              if (chunk == 0) inbox.receive(kLinearTilesTokenRows * Width * int(sizeof(float)));
            },
            [&](int chunk, int row, int feature, float(&v)[kVec]) {
              load_sums(parts.of(0, warp) + chunk * kLinearTilesChunkFloats, row, feature, v);
              for (int split = 1; split < c.splits; ++split) {
                float more[kVec];
                load_sums(parts.of(split, warp) + chunk * kLinearTilesChunkFloats, row, feature, more);
#pragma unroll
                for (int e = 0; e < kVec; ++e) v[e] += more[e];
              }
            });
        continue;
      }
      // The last tile's end is hidden by no products: the other warpgroup takes half of it. Its sums lie where the ring
      // was.
      constexpr int row_chunks = linear_tiles_chunks(Width);
      float* const half = reinterpret_cast<float*>(ring.first) + warp % 4 * row_chunks * kLinearTilesChunkFloats;
      if (InTurn && is_last) {
        if (is_own) {
#pragma unroll
          for (int chunk = 0; chunk < row_chunks; ++chunk)
            store_chunk<Width, blocks>(sum, row_chunks + chunk, half + chunk * kLinearTilesChunkFloats);
          arrive_at_named_barrier(kTurnBarrier + 1 - group, kConsumers);
        } else {
          named_barrier(kTurnBarrier + group, kConsumers);
        }
      }
      finish_chunks<T>(
          c.output, c.tokens, tile.token + warp_row + (is_own ? 0 : 64), InTurn && is_last ? 1 : blocks, tile.feature,
          Width, bias[is_own ? group : 1 - group],
          [&](int chunk) {
            if (!is_own) return;
            __syncwarp();
            store_chunk<Width, blocks>(sum, chunk, chunk_sums);
            __syncwarp();
          },
          [&](int chunk, int row, int feature, float(&v)[kVec]) {
            load_sums(is_own ? chunk_sums : half + chunk * kLinearTilesChunkFloats, row, feature, v);
          });
    }
  }
#endif
}

template <class T>
auto kernel_for(const LinearTilesShape& shape) {
  if (shape.in_turn) return shape.width == 160 ? linear_tiles_kernel<T, 160, true> : linear_tiles_kernel<T, 128, true>;
  switch (shape.width) {
    case 160: return linear_tiles_kernel<T, 160, false>;
    case 240: return linear_tiles_kernel<T, 240, false>;
    default: return linear_tiles_kernel<T, 256, false>;
  }
}

}  // namespace

Result<bool> prepare_linear_tiles(const ops::Linear::Args& a, const LinearTilesPlan& plan, LaunchList& launches) {
  const auto* const dense = std::get_if<DenseWeight>(&a.linear.weight);
  const auto d = ops::Linear::dims(a);
  const DType dtype = a.x.dtype;
  if (!is_linear_tiles(launches.arch(), d.tokens, d.in, d.out, dtype, !dense) || !runs_wgmma(launches.device()))
    return false;
  CUtensorMap weight, x;
  CF_TRY(make_tensor_map({.data = dense->weight.data, .dtype = dtype, .columns = d.in, .rows = d.out},
                         plan.shape.width / plan.token_blocks, weight));
  CF_TRY(make_tensor_map({.data = a.x.data, .dtype = dtype, .columns = d.in, .rows = d.tokens},
                         kLinearTilesTokenRows / plan.feature_blocks, x));
  const TilesCall c{.output = linear_output(a),
                    .tokens = int(d.tokens),
                    .steps = int((d.in + kLinearWgmmaColumns - 1) / kLinearWgmmaColumns),
                    .token_blocks = plan.token_blocks,
                    .feature_blocks = plan.feature_blocks,
                    .splits = plan.splits,
                    .token_groups = plan.token_groups,
                    .groups = plan.groups(),
                    .clusters = plan.clusters};
  CF_TRY(launch(ops::Linear::name, launches,
                {.grid = unsigned(plan.clusters * plan.cluster_blocks()),
                 .block = kThreads,
                 .smem_bytes = std::size_t(plan.smem_bytes),
                 .cluster_blocks = plan.cluster_blocks()},
                dtype == DType::f16 ? kernel_for<f16>(plan.shape) : kernel_for<bf16>(plan.shape), weight, x, c));
  return true;
}

Result<bool> prepare_linear_tiles(const ops::Linear::Args& a, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  const bool has_gelu = a.epilogue == ops::Epilogue::gelu_erf || a.epilogue == ops::Epilogue::gelu_tanh;
  return prepare_linear_tiles(a, linear_tiles_plan(launches.arch(), d.tokens, d.in, d.out, has_gelu), launches);
}

}  // namespace cf::cuda
