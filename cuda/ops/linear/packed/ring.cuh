#pragma once
// Ring: the copy engine brings a warp's codes and scales, tile after tile, into stages in shared memory.
#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/packed/plan.hpp"

namespace cf::cuda {

/// What a warp multiplies: its slice of the columns, and every `turns`-th tile of its cluster's.
struct GptqWarp {
  int lane, g, t;         // g = lane / 4, t = lane % 4
  unsigned index;         // of the warp in its block
  int part, turn;         // which part of the block's columns, which of that part's warps
  int rank;               // of the block in its cluster
  int first_tile, tiles;  // the cluster's
  GptqSlice slice;

  __device__ GptqWarp(const GptqMatrix& m, const GptqPlan& plan, int turns)
      : GptqWarp(plan, turns, gptq_tiles(plan, m.tiles, cluster_index())) {}

 private:
  __device__ GptqWarp(const GptqPlan& plan, int turns, const GptqTiles& of_cluster)
      : lane(threadIdx.x % 32),
        g(lane / 4),
        t(lane % 4),
        index(unsigned(same_in_warp(int(threadIdx.x / 32)))),
        part(int(index % kGptqParts)),
        turn(turns == 1 ? 0 : int(index / kGptqParts)),
        rank(cluster_rank()),
        first_tile(of_cluster.first),
        tiles(of_cluster.count),
        slice(gptq_slice(plan, gptq_part(plan, rank, part))) {}
};

/// A block's shared memory, as one warp sees it.
struct GptqSmem {
  char* ring;              // the warp's stages
  uint4* x;                // the warp's or its part's activations, where gptq_x_bytes() has room for them
  float* partial;          // [tile][part][token][row] sums; in every second pair of tokens rows 8 .. 15 come first
  float* received;         // [other rank][element] sums that the cluster's other blocks sent
  std::uint64_t* arrived;  // the barrier that counts these sums' bytes
  std::uint64_t* full;     // [stage] the barriers of the warp's stages

  __device__ GptqSmem(const GptqPlan& p, char* smem, int warp) {
    const int elements = p.tiles * kGptqRows << p.token_bits, part = warp % kGptqParts;
    ring = smem + warp * p.stages * p.stage_bytes;
    smem += kGptqParts * p.turns * p.stages * p.stage_bytes;
    x = reinterpret_cast<uint4*>(smem + (p.digit_bytes ? warp * p.digit_bytes : part * p.tokens * kGptqTokenBytes));
    smem += gptq_x_bytes(p);
    partial = reinterpret_cast<float*>(smem);
    received = partial + kGptqParts * elements;
    arrived = reinterpret_cast<std::uint64_t*>(received + (p.split - 1) * p.block_elements);
    full = arrived + 1 + warp * p.stages;
  }
};

/// A warp's ring. Tile turn + i * Turns lies in stage i % stages: the codes of the warp's slice, then its scales.
template <int Turns>
class GptqRing {
 public:
  __device__ GptqRing(const GptqMatrix& m, const GptqPlan& plan, const GptqWarp& warp, const GptqSmem& at)
      : plan_(plan),
        warp_(warp),
        at_(at),
        code_bytes_(warp.slice.count * kGptqTileBytes),
        scale_bytes_(warp.slice.groups * kGptqGroupBytes),
        code_tile_bytes_(m.chunks * kGptqTileBytes),
        scale_tile_bytes_(m.groups * kGptqGroupBytes),
        codes_(m.codes + long(warp.first_tile) * code_tile_bytes_ + warp.slice.first * kGptqTileBytes),
        scales_(m.scales + long(warp.first_tile) * scale_tile_bytes_ + warp.slice.first_group * kGptqGroupBytes) {}

  /// Requests the early stages, before the activations are there.
  __device__ void start() const {
    if (warp_.slice.count > 0 && elected()) {
#pragma unroll 1
      for (int i = 0; i < plan_.stages; ++i) init_barrier(at_.full + i, 1);
      publish_barriers();
      request_stages(0, plan_.early);
    }
    __syncwarp();
  }
  /// Requests the ring's other stages.
  __device__ void fill() const {
    if (warp_.slice.count > 0 && elected()) request_stages(plan_.early, plan_.stages);
  }
  /// Waits for the current stage.
  __device__ const char* wait() const {
    const char* const from_stage = at_.ring + slot_.stage * plan_.stage_bytes;
    wait_barrier(at_.full + slot_.stage, slot_.parity);
    return from_stage;
  }
  /// Gives the current stage, which held `tile`, to a later tile.
  __device__ void release(int tile) {
    __syncwarp();
    if (const int next = tile + plan_.stages * Turns; next < warp_.tiles && elected()) request(next, slot_.stage);
    slot_.next(plan_.stages);
  }
  /// Bytes of a stage's codes. The stage's scales lie behind them.
  __device__ int code_bytes() const { return code_bytes_; }

 private:
  __device__ void request(int tile, int stage) const {
    char* const to = at_.ring + stage * plan_.stage_bytes;
    arrive_expecting(at_.full + stage, code_bytes_ + scale_bytes_);
    copy_bulk(to, codes_ + long(tile) * code_tile_bytes_, code_bytes_, at_.full + stage);
    copy_bulk(to + code_bytes_, scales_ + long(tile) * scale_tile_bytes_, scale_bytes_, at_.full + stage);
  }
  __device__ void request_stages(int first, int end) const {
#pragma unroll 1
    for (int i = first; i < end; ++i)
      if (const int tile = warp_.turn + i * Turns; tile < warp_.tiles) request(tile, i);
  }

  const GptqPlan& plan_;
  const GptqWarp& warp_;
  const GptqSmem& at_;
  const int code_bytes_, scale_bytes_, code_tile_bytes_, scale_tile_bytes_;
  const char *const codes_, *const scales_;
  RingSlot slot_;
};

}  // namespace cf::cuda
