#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kAttentionWarps = 4;  // of a block
inline constexpr int kMaxStages = 3;       // tiles of a block's ring
inline constexpr int kMaxSplits = 8;       // splits of a query's keys: the blocks of a portable cluster

/// The kv head that a query head reads, where `group` query heads share each kv head: head / group, as a product with
/// ceil(2^32 / group). It is exact for up to 65535 heads, the most that a grid takes. With a division the compiler
/// gives the float32 kernel 80 registers instead of 110 and keeps fewer loads in flight.
class KvHeadOf {
 public:
  constexpr explicit KvHeadOf(std::int64_t group)
      : reciprocal_(((std::uint64_t(1) << 32) + std::uint64_t(group) - 1) / std::uint64_t(group)) {}
  constexpr int operator()(int head) const { return int(std::uint64_t(unsigned(head)) * reciprocal_ >> 32); }

 private:
  std::uint64_t reciprocal_;
};

/// The head size that a kernel is compiled for.
constexpr int padded_head_dim(std::int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 80 ? 80 : head_dim <= 128 ? 128 : kMaxHeadDim;
}

/// A tile lies in shared memory as eight runs of keys and then eight runs of values. A run is contiguous, as it is in
/// the cache. The pitch is the number of 16-bit elements from one run to the next: an odd number of 16-byte units, so
/// that the same column of eight runs lies in different banks.
constexpr int run_pitch(int tile_keys, int head_dim) { return tile_keys / 8 * head_dim + 8; }
inline constexpr int kTileArrivals = 8;  // at a tile's barrier: one for each run of keys and its values
constexpr int tile_bytes(int tile_keys, int head_dim) { return 16 * run_pitch(tile_keys, head_dim) * 2; }

/// Keys that a warp attends to at once: as many as its registers hold.
constexpr int keys_at_once(int padded_head_dim) { return padded_head_dim > 80 ? 16 : 32; }

/// Keys of a tile. In decode attention the warps share the tile's keys; in a prefill each warp attends to all of them.
constexpr int decode_tile(int padded_head_dim) { return kAttentionWarps * keys_at_once(padded_head_dim); }
constexpr int prefill_tile(int padded_head_dim) { return padded_head_dim > 128 ? 32 : 64; }

/// Queries of a prefill's block. With 32 queries instead of 16 a warp reads shared memory half as often. Heads above 80
/// elements leave no registers for that.
constexpr int prefill_queries(int padded_head_dim) { return (padded_head_dim > 80 ? 16 : 32) * kAttentionWarps; }
inline constexpr int kPrefillStages = 2;
constexpr int prefill_smem_bytes(int padded_head_dim) {
  return kPrefillStages * tile_bytes(prefill_tile(padded_head_dim), padded_head_dim);
}

/// Whether the prefill kernel is faster than the decode kernel, which gives each query blocks of its own.
constexpr bool prefill_pays(std::int64_t q_len) { return q_len >= 16; }

/// The prefill on Hopper's tensor cores. A warpgroup attends with kWgmmaQueries queries to kWgmmaKeys keys at once.
inline constexpr int kWgmmaQueries = 64, kWgmmaKeys = 64;
inline constexpr int kWgmmaTileBytes = kWgmmaKeys * 128;  // a tile's row has 64 elements

/// Whether that kernel is faster than the other prefill kernel. `head_dim` is a multiple of 8.
constexpr bool wgmma_pays(const Arch& arch, std::int64_t head_dim, std::int64_t q_len) {
  return arch.compute_capability == 90 && head_dim <= 128 && q_len >= 64;
}

/// Tiles side by side that hold a key or value.
constexpr int wgmma_columns(int padded_head_dim) { return (padded_head_dim + 63) / 64; }
/// Tiles of a block's rings, of keys and of values.
constexpr int wgmma_stages(int warpgroups) { return warpgroups > 1 ? 4 : 3; }
/// Threads of a block: one warpgroup more copies the tiles, and leaves its registers to the others.
constexpr int wgmma_threads(int warpgroups) { return 128 * (warpgroups + 1); }
inline constexpr int kWgmmaCopyRegisters = 24;  // of a thread that copies
constexpr int wgmma_registers(int warpgroups) { return warpgroups > 1 ? 240 : 232; }
/// Blocks that the plan expects on an SM: two warpgroups in any case, so that one computes weights while the tensor
/// cores multiply for the other.
constexpr int wgmma_blocks_per_sm(int warpgroups) { return warpgroups > 1 ? 1 : 2; }

/// How the prefill on Hopper's tensor cores divides its work.
struct WgmmaPlan {
  int warpgroups;    // of a block
  int query_blocks;  // blocks that share a head's queries
  int smem_bytes;    // of a block
};

/// The plan with blocks of this many warpgroups. The rings begin at a multiple of 1024 bytes.
constexpr WgmmaPlan wgmma_plan_of(int warpgroups, std::int64_t head_dim, std::int64_t q_len) {
  const int queries = warpgroups * kWgmmaQueries, columns = wgmma_columns(padded_head_dim(head_dim));
  return {.warpgroups = warpgroups,
          .query_blocks = int((q_len + queries - 1) / queries),
          .smem_bytes = 1024 + wgmma_stages(warpgroups) * 2 * columns * kWgmmaTileBytes};
}

/// `heads` = batch * heads. Two warpgroups read each tile once. Where their blocks would leave an SM without one, each
/// warpgroup has a block of its own.
constexpr WgmmaPlan wgmma_plan(const Arch& arch, std::int64_t head_dim, std::int64_t q_len, std::int64_t heads) {
  const WgmmaPlan two = wgmma_plan_of(2, head_dim, q_len);
  return two.query_blocks * heads >= arch.sm_count ? two : wgmma_plan_of(1, head_dim, q_len);
}

/// Floats of a partial result: head_dim sums of weighted values, the softmax's maximum and sum, and padding to 16
/// bytes.
constexpr int part_floats(int head_dim) { return head_dim + 4; }

/// How decode attention divides its work. The kernel computes the same with any plan, to rounding.
struct AttentionPlan {
  int splits;      // of a query's keys: 1, 2, 4 or 8 blocks, which form one cluster
  int stages;      // tiles of keys and values of a block's ring
  int smem_bytes;  // of a block

  bool operator==(const AttentionPlan&) const = default;
};

/// Blocks that the plan expects on an SM. Heads above 128 elements take so many registers that one block fits.
constexpr int decode_blocks_per_sm(int padded_head_dim) { return padded_head_dim > 128 ? 1 : 2; }

/// `queries` = batch * q_len * heads. The number of splits doubles while each split has at least one tile of max_kv_len
/// keys and there are at most three blocks for two SMs: an H200 holds fewer whole clusters than it has room for blocks,
/// and clusters that wait for a second turn double the time. The ring is as long as shared memory allows, but no longer
/// than a split.
constexpr AttentionPlan attention_plan(const Arch& arch, std::int64_t head_dim, std::int64_t queries,
                                       std::int64_t max_kv_len) {
  const int padded = padded_head_dim(head_dim), keys = decode_tile(padded), stage_bytes = tile_bytes(keys, padded);
  int splits = 1;
  while (splits < std::min(kMaxSplits, arch.max_cluster_blocks) && max_kv_len > splits * keys &&
         queries * splits * 2 <= arch.sm_count * 3 / 2)
    splits *= 2;

  const int parts_bytes = (kMaxSplits + kAttentionWarps) * part_floats(padded) * 4;
  // The driver and the kernel's static variables take 2 KB of a block's shared memory.
  const int most_bytes =
      std::min(arch.smem_per_sm_bytes / decode_blocks_per_sm(padded), arch.smem_per_block_bytes) - 2048;
  const std::int64_t split_tiles = (max_kv_len + splits * keys - 1) / (splits * keys);
  const int stages = int(std::min<std::int64_t>({kMaxStages, (most_bytes - parts_bytes) / stage_bytes, split_tiles}));
  return {.splits = splits, .stages = stages, .smem_bytes = parts_bytes + stages * stage_bytes};
}

/// The tiles [begin, end) of one split of a query's keys. `used` splits have tiles: all of them, or as many as there
/// are tiles. A query without keys has one split, whose result is NaN.
struct SplitTiles {
  int used, begin, end;

  constexpr SplitTiles(int tiles, int splits, int split)
      : used(std::max(1, std::min(splits, tiles))),
        begin(before(tiles, splits, split)),
        end(before(tiles, splits, split + 1)) {}

 private:
  static constexpr int before(int tiles, int splits, int split) {
    return tiles < splits ? std::min(split, tiles) : tiles * split / splits;
  }
};

static_assert(prefill_smem_bytes(128) <= kRtx5090.smem_per_block_bytes &&
              prefill_smem_bytes(kMaxHeadDim) <= kRtx5090.smem_per_block_bytes);
static_assert(wgmma_blocks_per_sm(1) * 128 * (wgmma_registers(1) + kWgmmaCopyRegisters) <= kH200.registers_per_sm &&
              wgmma_blocks_per_sm(2) * 128 * (2 * wgmma_registers(2) + kWgmmaCopyRegisters) <= kH200.registers_per_sm);
// Beside its dynamic shared memory a block has the rings' barriers.
static_assert(wgmma_plan_of(1, 128, 64).smem_bytes + 256 <= smem_per_block_bytes(kH200, wgmma_blocks_per_sm(1)) &&
              wgmma_plan_of(2, 128, 64).smem_bytes + 256 <= smem_per_block_bytes(kH200, wgmma_blocks_per_sm(2)));

}  // namespace cf::cuda
