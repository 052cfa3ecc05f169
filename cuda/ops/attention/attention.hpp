#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "core/ops/attention.hpp"
#include "cuda/device/gqa_tile.hpp"
#include "cuda/ops/attention/prefill_table.hpp"
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/run_table.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kAttentionWarps = 4;  // of a block
inline constexpr int kMaxStages = 3;       // tiles of a block's ring
inline constexpr int kMaxSplits = 8;       // splits of a lone head's keys: the blocks of a portable cluster
inline constexpr int kMaxGqaSplits = 16;   // splits of the keys of a GQA tile with several heads

/// The query heads that read one kv head, by their number. Divisions by it are a product and a shift. With a division
/// the compiler gives the float32 kernel 72 registers instead of 100 and keeps fewer loads in flight.
/// Source: Granlund, Montgomery 1994, figure 4.1.
class HeadGroup {
 public:
  /// 1 <= size < 2^31.
  constexpr explicit HeadGroup(std::int64_t size)
      : size_(int(size)),
        shift_(std::bit_width(std::uint64_t(size - 1))),
        factor_(std::uint32_t(((std::uint64_t(1) << 32) * ((std::uint64_t(1) << shift_) - std::uint64_t(size)) +
                               std::uint64_t(size) - 1) /
                              std::uint64_t(size))) {}
  constexpr int size() const { return size_; }
  /// n / size(), exact for 0 <= n < 2^31: the factor 2^32 + factor_ is 2^(32 + shift_) / size, rounded up.
  constexpr int quotient(int n) const {
    const auto dividend = std::uint32_t(n);
    return int((dividend + std::uint32_t(std::uint64_t(dividend) * factor_ >> 32)) >> shift_);
  }

 private:
  int size_, shift_;
  std::uint32_t factor_;
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

/// Rows of a prefill's block. A kv head has q_len * group rows: the heads of its group for query 0, then for query 1,
/// and so on. The rows of a block share each load of keys and values. With 32 rows instead of 16 a warp reads shared
/// memory half as often. Heads above 80 elements leave no registers for that.
constexpr int prefill_rows(int padded_head_dim) { return (padded_head_dim > 80 ? 16 : 32) * kAttentionWarps; }
/// The rows of a block that takes runs of any lengths and windows: masks at both ends take registers.
constexpr int prefill_runs_rows(int padded_head_dim) { return (padded_head_dim > 64 ? 16 : 32) * kAttentionWarps; }
/// Whether such a block takes streams: their rings, and queries of their own for the sinks. Larger heads leave no
/// registers for that.
constexpr bool takes_streams(int padded_head_dim) { return padded_head_dim <= 128; }
inline constexpr int kPrefillStages = 2;
constexpr int prefill_smem_bytes(int padded_head_dim) {
  return kPrefillStages * tile_bytes(prefill_tile(padded_head_dim), padded_head_dim);
}

/// Whether a prefill kernel is faster than the decode kernel, which gives each query of a GQA tile blocks of its own.
/// The heads of a group do not count.
constexpr bool prefill_pays(const Arch& arch, std::int64_t q_len) { return q_len >= arch.tuning->prefill_queries; }

/// The prefill on Hopper's tensor cores. A warpgroup attends with kWgmmaQueryRows rows to kWgmmaKeys keys at once.
inline constexpr int kWgmmaQueryRows = 64, kWgmmaKeys = 64;
inline constexpr int kWgmmaTileBytes = kWgmmaKeys * 128;  // a tile's row has 64 elements

/// Whether that kernel is faster than the other prefill kernel: the rows of a kv head fill a warpgroup. An invariant
/// model takes it for any number of rows. `head_dim` is a multiple of 8.
constexpr bool wgmma_pays(const Arch& arch, std::int64_t head_dim, std::int64_t rows) {
  return arch.has_wgmma() && head_dim <= 128 && (rows >= kWgmmaQueryRows || arch.tuning->is_invariant());
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
  int warpgroups;  // of a block
  int row_blocks;  // blocks that share a kv head's rows
  int smem_bytes;  // of a block
};

inline std::string to_string(const WgmmaPlan& p) {
  return plan_text(
      {{p.row_blocks, "blocks a kv head"}, {p.warpgroups, "warpgroups"}, {p.smem_bytes, "B of shared memory"}});
}

/// The plan with blocks of this many warpgroups. The rings begin at a multiple of 1024 bytes.
constexpr WgmmaPlan wgmma_plan_of(int warpgroups, std::int64_t head_dim, std::int64_t rows) {
  const int block_rows = warpgroups * kWgmmaQueryRows, columns = wgmma_columns(padded_head_dim(head_dim));
  return {.warpgroups = warpgroups,
          .row_blocks = int((rows + block_rows - 1) / block_rows),
          .smem_bytes = 1024 + wgmma_stages(warpgroups) * 2 * columns * kWgmmaTileBytes};
}

/// `rows` = q_len * group of each kv head, `kv_heads` = batch * kv_heads. Two warpgroups read each tile once. Where
/// their blocks would leave an SM without one, each warpgroup has a block of its own.
constexpr WgmmaPlan wgmma_plan(const Arch& arch, std::int64_t head_dim, std::int64_t rows, std::int64_t kv_heads) {
  const WgmmaPlan two = wgmma_plan_of(2, head_dim, rows);
  return two.row_blocks * kv_heads >= arch.sm_count ? two : wgmma_plan_of(1, head_dim, rows);
}

/// Floats of a partial result: head_dim sums of weighted values, the softmax's maximum and sum, and padding to 16
/// bytes.
constexpr int part_floats(int head_dim) { return head_dim + 4; }

/// How decode attention divides its work. The kernel computes the same with any plan, to rounding.
struct AttentionPlan {
  int gqa_heads;   // query heads of a GQA tile, which attend together to keys that are loaded once; divides the group
  int splits;      // of a GQA tile's keys: 1, 2, 4, 8 or 16 blocks, which form one cluster
  int stages;      // tiles of keys and values of a block's ring
  int smem_bytes;  // of a block

  bool operator==(const AttentionPlan&) const = default;
};

inline std::string to_string(const AttentionPlan& p) {
  return plan_text({{p.gqa_heads, "heads a GQA tile"},
                    {p.splits, "splits"},
                    {p.stages, "stages"},
                    {p.smem_bytes, "B of shared memory"}});
}

/// Blocks that the plan expects on an SM. Heads above 128 elements take so many registers that one block fits.
constexpr int decode_blocks_per_sm(int padded_head_dim) { return padded_head_dim > 128 ? 1 : 2; }

/// The most keys that a query sees. As Dims::seen(), but constexpr, so that plans are checked when they are compiled.
constexpr std::int64_t most_keys(const ops::Attention::Dims& d) {
  return d.window ? std::min(d.max_kv_len, d.window.sinks + d.window.keys) : d.max_kv_len;
}

/// The query heads of a GQA tile: one in small caches, where each query head loads keys by itself. The float32 kernel
/// has one head a block.
constexpr int gqa_heads_of(const Arch& arch, const ops::Attention::Dims& d, DType activation) {
  const bool together = activation != DType::f32 && most_keys(d) * d.head_dim > arch.tuning->unshared_elements;
  return together ? gqa_tile_heads(int(d.heads / d.kv_heads)) : 1;
}

/// The most splits of a GQA tile's keys. Where an SM holds two blocks, a cluster of kMaxGqaSplits blocks fits half of a
/// GPC's SMs.
constexpr int most_splits(const Arch& arch, const ops::Attention::Dims& d, int gqa_heads) {
  const bool many = gqa_heads > 1 && most_keys(d) > arch.tuning->few_splits_entries &&
                    decode_blocks_per_sm(padded_head_dim(d.head_dim)) > 1;
  return many ? std::min(kMaxGqaSplits, arch.largest_cluster_blocks) : std::min(kMaxSplits, arch.max_cluster_blocks);
}

/// Partial results that a block's inbox has room for. The block of split s merges the heads s, s + used, s + 2 * used
/// and so on of a GQA tile, each of `used` partial results.
constexpr int inbox_parts(int gqa_heads) { return gqa_heads > 1 ? gqa_heads + kMaxGqaSplits - 1 : kMaxSplits; }
/// Partial results that a block has room for beside its ring. The warps' partial results of several heads lie in the
/// ring, when no warp reads it any more. A lone head's have a place of their own, where no warp waits for the others.
constexpr int parts_beside_ring(int gqa_heads) {
  return inbox_parts(gqa_heads) + (gqa_heads > 1 ? 0 : kAttentionWarps);
}

/// Whether a call asks for more than all keys of a contiguous cache: pages, a window that leaves keys out, or sinks.
inline bool needs_any_cache(const ops::Attention::Args& a) {
  return a.page_table || a.q_sinks || (a.window && a.window.keys < a.max_kv_len);
}

/// The most tiles of keys that a query sees: SeenTiles of max_kv_len keys.
constexpr int most_tiles(const ops::Attention::Dims& d, int tile_keys) {
  const auto tiles = [=](std::int64_t keys) { return int((keys + tile_keys - 1) / tile_keys); };
  return d.window ? tiles(d.window.sinks) + tiles(std::min(d.window.keys, d.max_kv_len)) : tiles(d.max_kv_len);
}

/// Whether there are so many GQA tiles that a block's ring has one tile: then an SM holds four blocks, and one attends
/// while the others' tiles are under way. In contiguous caches few long sequences are slower so, and keep two tiles.
constexpr bool is_crowd(const Arch& arch, const ops::Attention::Dims& d, std::int64_t gqa_tiles) {
  return padded_head_dim(d.head_dim) <= 80 && gqa_tiles >= 8 * arch.sm_count &&
         (d.batch > arch.tuning->two_tile_sequences || d.pool);
}

/// The number of splits doubles while each split has at least one tile of max_kv_len keys and all clusters have their
/// SMs at once. The ring is as long as shared memory allows, but no longer than a split.
constexpr AttentionPlan attention_plan(const Arch& arch, const ops::Attention::Dims& d, DType activation) {
  const int padded = padded_head_dim(d.head_dim), keys = decode_tile(padded), stage_bytes = tile_bytes(keys, padded);
  const int gqa_heads = gqa_heads_of(arch, d, activation), most = most_splits(arch, d, gqa_heads);
  const std::int64_t tiles = d.batch * d.q_len * (d.heads / gqa_heads);
  const int key_tiles = most_tiles(d, keys);
  int splits = 1;
  while (splits < most && key_tiles > splits &&
         tiles * splits * 2 <= arch.sm_count * arch.tuning->split_blocks_on_two_sms / 2)
    splits *= 2;

  const int parts_bytes = parts_beside_ring(gqa_heads) * part_floats(padded) * 4;
  // The driver and the kernel's static variables take 2 KB of a block's shared memory.
  const int most_bytes =
      std::min(arch.smem_per_sm_bytes / decode_blocks_per_sm(padded), arch.smem_per_block_bytes) - 2048;
  const int split_tiles = (key_tiles + splits - 1) / splits;
  const int most_stages = is_crowd(arch, d, tiles) ? 1 : kMaxStages;
  const int stages = std::min({most_stages, (most_bytes - parts_bytes) / stage_bytes, split_tiles});
  return {.gqa_heads = gqa_heads, .splits = splits, .stages = stages, .smem_bytes = parts_bytes + stages * stage_bytes};
}

/// The keys that a query sees of a cache of any kind, in tiles: first the sinks, which have tiles of their own, then the
/// keys of its window. Each of the two begins with a tile's first key.
class SeenTiles {
 public:
  /// Of a query that sees `visible` keys without a window.
  constexpr SeenTiles(const KeyWindow& window, int visible, int tile_keys)
      : tile_keys_(tile_keys),
        first_(int(window.first(visible))),
        end_(visible),
        sinks_(int(std::min<std::int64_t>(window.sinks, visible))),
        sink_tiles_(tiles_of(sinks_)) {}

  constexpr int count() const { return sink_tiles_ + tiles_of(end_ - first_); }
  /// Those of the sinks are the tiles before this one.
  constexpr int sink_tiles() const { return sink_tiles_; }
  /// The first key of a tile.
  constexpr int first_key(int tile) const {
    return tile < sink_tiles_ ? tile * tile_keys_ : first_ + (tile - sink_tiles_) * tile_keys_;
  }
  /// How many keys are seen from a tile's first one on: those of the tiles behind it count, but the sinks and the
  /// window do so apart.
  constexpr int keys_from(int tile) const { return (tile < sink_tiles_ ? sinks_ : end_) - first_key(tile); }
  /// The newest key, if the keys of all tiles were numbered one after the other.
  constexpr int newest() const { return end_ > first_ ? sink_tiles_ * tile_keys_ + end_ - first_ - 1 : sinks_ - 1; }

 private:
  constexpr int tiles_of(int keys) const { return (keys + tile_keys_ - 1) / tile_keys_; }
  int tile_keys_, first_, end_, sinks_, sink_tiles_;
};

/// SeenTiles of a query that sees all keys up to its own.
class AllTiles {
 public:
  constexpr AllTiles(int keys, int tile_keys) : keys_(keys), tile_keys_(tile_keys) {}
  constexpr int count() const { return (keys_ + tile_keys_ - 1) / tile_keys_; }
  constexpr int keys_from(int tile) const { return keys_ - tile * tile_keys_; }
  constexpr int newest() const { return keys_ - 1; }

 private:
  int keys_, tile_keys_;
};

/// The tiles [begin, end) of keys of one split of a GQA tile. `used` splits have tiles: all of them, or as many as
/// there are tiles. A GQA tile without keys has one split, whose results are NaN.
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

/// Whether the warps' partial results of the largest GQA tile fit the ring's first tile.
constexpr bool parts_fit_ring(int padded_head_dim) {
  return kAttentionWarps * kMaxGqaHeads * part_floats(padded_head_dim) * 4 <=
         tile_bytes(decode_tile(padded_head_dim), padded_head_dim);
}
static_assert(parts_fit_ring(64) && parts_fit_ring(80) && parts_fit_ring(128) && parts_fit_ring(kMaxHeadDim));
static_assert(prefill_smem_bytes(128) <= kRtx5090.smem_per_block_bytes &&
              prefill_smem_bytes(kMaxHeadDim) <= kRtx5090.smem_per_block_bytes);
static_assert(wgmma_blocks_per_sm(1) * 128 * (wgmma_registers(1) + kWgmmaCopyRegisters) <= kH200.registers_per_sm &&
              wgmma_blocks_per_sm(2) * 128 * (2 * wgmma_registers(2) + kWgmmaCopyRegisters) <= kH200.registers_per_sm);
// Beside its dynamic shared memory a block has the rings' barriers.
static_assert(wgmma_plan_of(1, 128, 64).smem_bytes + 256 <= smem_per_block_bytes(kH200, wgmma_blocks_per_sm(1)) &&
              wgmma_plan_of(2, 128, 64).smem_bytes + 256 <= smem_per_block_bytes(kH200, wgmma_blocks_per_sm(2)));

/// How the other prefill kernel divides its work.
struct PrefillPlan {
  int row_blocks;  // blocks that share a kv head's rows
  int smem_bytes;  // of a block
};
inline std::string to_string(const PrefillPlan& p) {
  return plan_text({{p.row_blocks, "blocks for a kv head's rows"}, {p.smem_bytes, "bytes of shared memory"}});
}

/// How the prefill kernels divide runs of any lengths, and how a launch over a cache in pages, or of windows, is made:
/// a launch a table.
struct WgmmaRunsPlan {
  int warpgroups, smem_bytes;  // of a block
  std::vector<PrefillTable> tables;
};
struct PrefillRunsPlan {
  int smem_bytes;
  std::vector<PrefillTable> tables;
};
std::string to_string(const WgmmaRunsPlan&);
std::string to_string(const PrefillRunsPlan&);

/// Two warpgroups a block, as wgmma_plan() has them, but one where more than a fourth of their warpgroups had no rows.
WgmmaRunsPlan wgmma_runs_plan(const Arch& arch, std::int64_t head_dim, RowRuns runs, std::int64_t group,
                              std::int64_t kv_heads);

/// How the float32 kernel divides its work: that of one head a block.
struct FloatAttentionPlan {
  int splits;  // of a head's keys, which form one cluster
};
inline std::string to_string(const FloatAttentionPlan& p) { return plan_text({{p.splits, "splits"}}); }

/// The plans of the kernels. All refuse a head_dim that is no multiple of 8 or above kMaxHeadDim.
Result<WgmmaPlan> plan_attention_wgmma(const Target&, const ops::Attention::Args&);
Result<WgmmaRunsPlan> plan_attention_wgmma_runs(const Target&, const ops::Attention::Args&);
Result<PrefillPlan> plan_attention_prefill(const Target&, const ops::Attention::Args&);
Result<PrefillRunsPlan> plan_attention_prefill_runs(const Target&, const ops::Attention::Args&);
Result<AttentionPlan> plan_attention_decode(const Target&, const ops::Attention::Args&);
Result<FloatAttentionPlan> plan_attention_f32(const Target&, const ops::Attention::Args&);
// Of runs with fewer queries than a prefill's, of any counts and of any sequences.
Result<TableLaunches<AttentionPlan>> plan_attention_decode_runs(const Target&, const ops::Attention::Args&);
Result<TableLaunches<FloatAttentionPlan>> plan_attention_f32_runs(const Target&, const ops::Attention::Args&);
Status launch_attention_wgmma(const ops::Attention::Args&, const WgmmaPlan&, LaunchList&);
Status launch_attention_wgmma_runs(const ops::Attention::Args&, const WgmmaRunsPlan&, LaunchList&);
Status launch_attention_prefill(const ops::Attention::Args&, const PrefillPlan&, LaunchList&);
Status launch_attention_prefill_runs(const ops::Attention::Args&, const PrefillRunsPlan&, LaunchList&);
Status launch_attention_decode(const ops::Attention::Args&, const AttentionPlan&, LaunchList&);
Status launch_attention_f32(const ops::Attention::Args&, const FloatAttentionPlan&, LaunchList&);
Status launch_attention_decode_runs(const ops::Attention::Args&, const TableLaunches<AttentionPlan>&, LaunchList&);
Status launch_attention_f32_runs(const ops::Attention::Args&, const TableLaunches<FloatAttentionPlan>&, LaunchList&);

}  // namespace cf::cuda
