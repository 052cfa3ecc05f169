#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/arch.hpp"

namespace cf::cuda {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kAttentionWarps = 4;  // of a block
inline constexpr int kMaxStages = 3;       // tiles in shared memory or on their way there
inline constexpr int kMaxSplits = 8;       // of a query's keys: blocks of a portable cluster

/// The head size that a kernel is compiled for.
constexpr int padded_head_dim(std::int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 80 ? 80 : head_dim <= 128 ? 128 : kMaxHeadDim;
}

/// A tile of keys and values lies in shared memory as eight runs of keys and eight of values, each as it lies in the
/// cache. 16-bit elements from one run to the next: an odd number of 16-byte units, so that eight runs' units of one
/// column lie in different banks.
constexpr int run_pitch(int tile_keys, int head_dim) { return tile_keys / 8 * head_dim + 8; }
inline constexpr int kTileArrivals = 8;  // at the barrier of a tile: one a run of keys and its values
constexpr int tile_bytes(int tile_keys, int head_dim) { return 16 * run_pitch(tile_keys, head_dim) * 2; }

/// Keys that a warp takes at once: what registers have room for.
constexpr int keys_at_once(int padded_head_dim) { return padded_head_dim > 80 ? 16 : 32; }

/// Keys of a tile. In decode attention the warps share it, in a prefill each takes all of it.
constexpr int decode_tile(int padded_head_dim) { return kAttentionWarps * keys_at_once(padded_head_dim); }
constexpr int prefill_tile(int padded_head_dim) { return padded_head_dim > 128 ? 32 : 64; }

/// Queries of a block of a prefill. A warp with twice 16 reads shared memory half as often; large heads' sums leave no
/// registers for that.
constexpr int prefill_queries(int padded_head_dim) { return (padded_head_dim > 80 ? 16 : 32) * kAttentionWarps; }
inline constexpr int kPrefillStages = 2;
constexpr int prefill_smem_bytes(int padded_head_dim) {
  return kPrefillStages * tile_bytes(prefill_tile(padded_head_dim), padded_head_dim);
}

/// Whether a prefill's blocks are faster than a query at a time, whose keys more blocks share.
constexpr bool prefill_pays(std::int64_t q_len) { return q_len >= 16; }

/// Floats of a part of a query's attention: head_dim sums of values; the softmax's maximum and sum; padding to 16
/// bytes.
constexpr int part_floats(int head_dim) { return head_dim + 4; }

/// How decode attention divides its work. Plans are values; the kernel computes the same for any of them, to rounding.
struct AttentionPlan {
  int splits;      // of a query's keys, each a block; they form one cluster: 1, 2, 4 or 8
  int stages;      // tiles of keys and values that a block has in shared memory or on their way there
  int smem_bytes;  // a block
};

/// Blocks that an SM is planned to hold: the largest heads' registers leave room for one.
constexpr int decode_blocks_per_sm(int padded_head_dim) { return padded_head_dim > 128 ? 1 : 2; }

/// `queries` = batch * q_len * heads. Splits while each keeps a tile of max_kv_len and three blocks come on two SMs at
/// most: an H200 holds fewer whole clusters than it has room for blocks, and what waits for a second turn doubles the
/// time. A ring as long as shared memory allows, but no longer than a split.
constexpr AttentionPlan attention_plan(const Arch& arch, std::int64_t head_dim, std::int64_t queries,
                                       std::int64_t max_kv_len) {
  const int padded = padded_head_dim(head_dim), keys = decode_tile(padded), stage_bytes = tile_bytes(keys, padded);
  int splits = 1;
  while (splits < std::min(kMaxSplits, arch.max_cluster_blocks) && max_kv_len > splits * keys &&
         queries * splits * 2 <= arch.sm_count * 3 / 2)
    splits *= 2;

  const int parts_bytes = (kMaxSplits + kAttentionWarps) * part_floats(padded) * 4;
  // The driver and the kernel's own variables take 2 KB a block.
  const int most_bytes =
      std::min(arch.smem_per_sm_bytes / decode_blocks_per_sm(padded), arch.smem_per_block_bytes) - 2048;
  const std::int64_t split_tiles = (max_kv_len + splits * keys - 1) / (splits * keys);
  const int stages = int(std::min<std::int64_t>({kMaxStages, (most_bytes - parts_bytes) / stage_bytes, split_tiles}));
  return {.splits = splits, .stages = stages, .smem_bytes = parts_bytes + stages * stage_bytes};
}

/// The tiles [begin, end) of one of a query's splits: as many splits as there are tiles have some. A query without keys
/// has one split, which makes NaN of it.
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

}  // namespace cf::cuda
