#pragma once
// How the product of 17 tokens or more with a packed GPTQ matrix is laid out for Hopper's tensor cores.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/ops/linear/wgmma/plan.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// A stage's weights: the codes of kLinearWgmmaTileRows rows and kLinearWgmmaColumns columns, and these rows' scales and
/// zeros in two groups, the second of which begins where the columns have more than one.
inline constexpr int kPackedCodesBytes = linear_wgmma_weight_bytes(4),
                     kPackedScalesBytes = kLinearWgmmaTileRows / kGptqRows * 2 * kGptqGroupBytes,
                     kPackedWeightBytes = kPackedCodesBytes + kPackedScalesBytes;

/// Up to this many tokens, whose rows and tiles an int counts.
inline constexpr std::int64_t kPackedTilesTokens = std::int64_t(1) << 24;

/// Why Hopper's tensor cores do not multiply a packed weight of `rows` rows. Empty where they do.
constexpr std::string_view why_no_packed_on_wgmma(const Arch& arch, std::int64_t tokens, std::int64_t in,
                                                  std::int64_t rows, DType activation) {
  return tokens < arch.tuning->packed_wgmma_first ? "takes more tokens" : why_no_wgmma(arch, in, rows, activation);
}
/// Why one block does not take all tokens of such a product. Empty where it does: few tokens.
constexpr std::string_view why_no_wgmma_packed(const Arch& arch, std::int64_t tokens, std::int64_t in,
                                               std::int64_t rows, DType activation) {
  return tokens > arch.tuning->packed_wgmma_tokens ? "takes fewer tokens"
                                                   : why_no_packed_on_wgmma(arch, tokens, in, rows, activation);
}
constexpr bool is_wgmma_packed(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t rows,
                               DType activation) {
  return why_no_wgmma_packed(arch, tokens, in, rows, activation).empty();
}
/// Why such a product is not divided into tiles of tokens. Empty where it is: many tokens.
constexpr std::string_view why_no_tiles_packed(const Arch& arch, std::int64_t tokens, std::int64_t in,
                                               std::int64_t rows, DType activation) {
  if (tokens <= arch.tuning->packed_wgmma_tokens) return "takes more tokens";
  if (tokens > kPackedTilesTokens) return "takes fewer tokens";
  return why_no_packed_on_wgmma(arch, tokens, in, rows, activation);
}
constexpr bool is_tiles_packed(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t rows,
                               DType activation) {
  return why_no_tiles_packed(arch, tokens, in, rows, activation).empty();
}

/// The bytes of scratch memory for x in the order of the matrix's columns. 0 where column k is input k: then x itself
/// is in this order.
constexpr std::size_t packed_columns_bytes(const GptqLayout& layout, std::int64_t tokens) {
  return layout.has_order ? std::size_t(tokens) * std::size_t(layout.chunks) * kGptqColumns * 2 : 0;
}

inline std::string columns_text(std::size_t columns_bytes) {
  return columns_bytes ? ", " + std::to_string(columns_bytes) + " B of x in the order of the columns" : "";
}

/// The blocks of an SM: those of few tokens need few registers, and wait for each step's codes beside each other.
constexpr int packed_blocks_an_sm(int token_tile) { return token_tile <= kPackedPairTokens ? 2 : 1; }

/// One launch for up to kLinearWgmmaTokens tokens, laid out as that of a dense weight with as many columns.
struct WgmmaPackedPlan {
  LinearWgmmaPlan product;
  std::size_t columns_bytes;
};

/// The stages of a block's ring, on every GPU with these tensor cores. The kernels are compiled with them.
constexpr int packed_stages(int token_tile) {
  return linear_wgmma_plan(kH200, token_tile, kLinearWgmmaColumns, 1, kPackedWeightBytes).stages;
}

constexpr WgmmaPackedPlan wgmma_packed_plan(const Arch& arch, const GptqLayout& layout, std::int64_t tokens,
                                            std::int64_t rows) {
  // Groups that end within a step have no kernel of 32 tokens a tile.
  const std::int64_t fewest = layout.columns_per_group % kLinearWgmmaColumns ? kPackedPairTokens + 1 : 17;
  return {.product = linear_wgmma_plan(arch, std::max(tokens, fewest), std::int64_t(layout.chunks) * kGptqColumns, rows,
                                       kPackedWeightBytes,
                                       packed_blocks_an_sm(linear_wgmma_token_tile(std::max(tokens, fewest)))),
          .columns_bytes = packed_columns_bytes(layout, tokens)};
}

inline std::string to_string(const WgmmaPackedPlan& p) { return to_string(p.product) + columns_text(p.columns_bytes); }

/// A tile is kLinearWgmmaTileRows rows of the weight and `token_tile` tokens: 64, 96, 128, 160, 192 or 256. The blocks of
/// a cluster have tiles of the same tokens, of rows beside each other, and share the copies of x. Such a group of tiles
/// lies at group i % token_groups of tokens and i / token_groups of rows; clusters take groups in turn.
///
/// The columns of a matrix of few rows are divided in halves, for any number of tokens: an element is the sum of both
/// halves. Where there are few tiles, two blocks of a cluster of four take a half each, side by side, and send each
/// other the sums that the other one finishes. Where there are many tiles, a block takes both halves in turn and parks
/// the sums of the first half in scratch memory.
inline constexpr int kPackedTilesBlocks = 2;

/// A warp's sums go through shared memory in chunks: kPackedTilesChunk tokens of its rows, in float32.
inline constexpr int kPackedTilesChunk = 16;
inline constexpr int kPackedTilesChunkFloats = kPackedTilesChunk * kLinearWgmmaPartPitch;
inline constexpr int kPackedTilesChunksBytes = kLinearWgmmaWarps * kPackedTilesChunkFloats * 4;
/// The bytes of a block's inbox: the block with the other half of the columns sends it the sums of half of the tile's
/// tokens.
constexpr int packed_tiles_inbox_bytes(int token_tile) { return token_tile / 2 * kLinearWgmmaTileRows * 4; }

/// The stages of a block's ring. Beside the ring a block has its inbox and its chunks, and its barriers as static memory.
inline constexpr int kPackedTilesStaticBytes = 256;
constexpr int packed_tiles_stage_bytes(int token_tile) {
  return kPackedWeightBytes + token_tile * kLinearWgmmaColumns * 2;
}
constexpr int packed_tiles_stages(int token_tile) {
  constexpr int room_bytes = kH200.smem_per_block_bytes - 1024 - kPackedTilesStaticBytes - kPackedTilesChunksBytes;
  const int ring_bytes = room_bytes - packed_tiles_inbox_bytes(token_tile);
  return std::min(ring_bytes / packed_tiles_stage_bytes(token_tile), kMostLinearWgmmaStages);
}
constexpr int packed_tiles_smem_bytes(int token_tile) {
  return 1024 + packed_tiles_stages(token_tile) * packed_tiles_stage_bytes(token_tile) +
         packed_tiles_inbox_bytes(token_tile) + kPackedTilesChunksBytes;
}

struct PackedTilesPlan {
  int token_tile;
  int halves;         // of the columns: 1 where they are not divided
  bool side_by_side;  // the halves are two blocks'
  int token_groups, row_groups;
  int clusters;
  std::size_t columns_bytes;

  constexpr int cluster_blocks() const { return kPackedTilesBlocks * (side_by_side ? halves : 1); }
  /// The bytes of scratch memory for the sums of first halves, behind columns_bytes.
  constexpr std::size_t parked_bytes() const {
    if (halves == 1 || side_by_side) return 0;
    return std::size_t(clusters) * kPackedTilesBlocks * kLinearWgmmaTileRows * std::size_t(token_tile) * 4;
  }
  constexpr std::size_t parked_at() const { return (columns_bytes + 255) / 256 * 256; }
  constexpr std::size_t scratch_bytes() const { return parked_bytes() ? parked_at() + parked_bytes() : columns_bytes; }
  constexpr int groups() const { return token_groups * row_groups; }
  constexpr int rounds() const { return (groups() + clusters - 1) / clusters; }
};

/// Whether the columns of a matrix are divided: not where a half would be short.
constexpr bool are_packed_columns_divided(const Arch& arch, const GptqLayout& layout, std::int64_t rows) {
  return rows <= arch.tuning->packed_divided_rows && layout.chunks >= 16;
}

constexpr PackedTilesPlan packed_tiles_layout(const Arch& arch, const GptqLayout& layout, std::int64_t tokens,
                                              std::int64_t rows, int token_tile, bool side_by_side) {
  const auto groups = [](std::int64_t size, int group) { return int((size + group - 1) / group); };
  PackedTilesPlan p{.token_tile = token_tile,
                    .halves = are_packed_columns_divided(arch, layout, rows) ? 2 : 1,
                    .side_by_side = side_by_side,
                    .token_groups = groups(tokens, token_tile),
                    .row_groups = groups(rows, kPackedTilesBlocks * kLinearWgmmaTileRows),
                    .clusters = arch.sm_count / kPackedTilesBlocks,
                    .columns_bytes = packed_columns_bytes(layout, tokens)};
  if (side_by_side) p.clusters = p.clusters / p.halves * arch.tuning->packed_clusters_elevenths / 11;
  p.clusters = std::clamp(p.clusters, 1, p.groups());
  return p;
}

/// The plan whose rounds take the least time, in units of a token. A round costs its tile's tokens and
/// kPackedTilesStepTokens for what a step does beside its products; with halves side by side a round has half of the
/// steps. Among equals the widest tile is taken, which reads the least. `may_park` says that scratch memory has room
/// for the sums of first halves.
inline constexpr int kPackedTilesStepTokens = 120;
constexpr PackedTilesPlan packed_tiles_plan(const Arch& arch, const GptqLayout& layout, std::int64_t tokens,
                                            std::int64_t rows, bool may_park = true) {
  const bool is_whole = layout.columns_per_group % kLinearWgmmaColumns == 0;  // no group ends within a step
  const bool is_divided = are_packed_columns_divided(arch, layout, rows);
  const auto length = [](const PackedTilesPlan& p) {
    return p.rounds() * (p.token_tile + kPackedTilesStepTokens) * (p.side_by_side ? 1 : 2);
  };
  PackedTilesPlan best{};
  for (const bool side_by_side : {false, true})
    for (const int token_tile : {256, 192, 160, 128, 96, 64}) {
      if (side_by_side ? !is_divided : is_divided && !may_park) continue;
      if (!is_whole && token_tile != 64 && token_tile != 128) continue;  // these have no other kernels
      const PackedTilesPlan p = packed_tiles_layout(arch, layout, tokens, rows, token_tile, side_by_side);
      if (best.token_tile == 0 || length(p) < length(best)) best = p;
    }
  return best;
}

inline std::string to_string(const PackedTilesPlan& p) {
  return plan_text({{p.clusters, "clusters"},
                    {p.rounds(), "rounds"},
                    {p.token_groups, "token groups"},
                    {p.row_groups, "row groups"},
                    {p.token_tile, "tokens a tile"},
                    {packed_tiles_smem_bytes(p.token_tile), "B of shared memory"}}) +
         (p.halves == 1    ? ""
          : p.side_by_side ? ", half of the columns a block"
                           : ", halves of the columns in turn") +
         columns_text(p.columns_bytes);
}

}  // namespace cf::cuda
