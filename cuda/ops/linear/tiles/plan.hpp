#pragma once
// How the product of more than 128 tokens with a 16-bit weight matrix, and GELU of it, is laid out for Hopper's tensor
// cores.
#include <cstdint>

#include "core/ops/linear.hpp"
#include "cuda/ops/linear/wgmma/plan.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// Up to this many tokens, whose rows and tiles an int counts.
inline constexpr std::int64_t kLinearTilesTokens = std::int64_t(1) << 24;

/// Why tiles do not take a product. Empty where they do: one with GELU and more tokens than wgmma takes. cuBLASLt has
/// no GELU by erf: a second pass over float32 sums does it. Without GELU cuBLASLt is faster.
constexpr std::string_view why_no_linear_tiles(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t out,
                                               DType activation, ops::Epilogue epilogue) {
  if (tokens <= arch.tuning->wgmma_tokens) return "takes more tokens";
  if (tokens > kLinearTilesTokens) return "takes fewer tokens";
  if (!ops::is_gelu(epilogue)) return "takes products with GELU";
  return why_no_wgmma(arch, in, out, activation);
}
constexpr bool is_linear_tiles(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t out,
                               DType activation, bool packed, ops::Epilogue epilogue) {
  return !packed && why_no_linear_tiles(arch, tokens, in, out, activation, epilogue).empty();
}

/// A tile is kLinearTilesTokenRows tokens and `width` features: the product's rows and columns. The two warpgroups of a
/// block share a tile, or take tiles in turn, so that one finishes its sums while the tensor cores work for the other.
/// The last tile's sums are finished by both. The two blocks of a cluster have tiles beside each other: of the same
/// features where warpgroups share a tile, of the same tokens where they take turns. They share the copies of the
/// weight or of x.
struct LinearTilesShape {
  bool in_turn;
  int width;

  constexpr int token_blocks() const { return in_turn ? 1 : 2; }
  constexpr int feature_blocks() const { return in_turn ? 2 : 1; }
};
inline constexpr LinearTilesShape kLinearTilesShared{false, 160}, kLinearTilesInTurn{true, 128};

inline constexpr int kLinearTilesTokenRows = kLinearWgmmaTileRows, kLinearTilesWarps = 8, kLinearTilesBlocks = 2;

/// A warp's sums go through shared memory in chunks: 16 tokens, 32 features, in float32.
inline constexpr int kLinearTilesChunk = 32, kLinearTilesChunkFloats = 16 * kLinearTilesChunk;
inline constexpr int kLinearTilesChunksBytes = kLinearTilesWarps * kLinearTilesChunkFloats * 4;

/// The stages of a block's ring. A stage is what linear_wgmma_stage_bytes() says, for `width` rows of the weight and a
/// tile's tokens. Beside the ring a block has its chunks, and its barriers and the bias as static memory.
inline constexpr int kLinearTilesStaticBytes = 1536;
constexpr int linear_tiles_stages(int width) {
  constexpr int align_bytes = 1024;
  return (kH200.smem_per_block_bytes - align_bytes - kLinearTilesStaticBytes - kLinearTilesChunksBytes) /
         linear_wgmma_stage_bytes(width);
}
constexpr int linear_tiles_smem_bytes(int width) {
  return 1024 + linear_tiles_stages(width) * linear_wgmma_stage_bytes(width) + kLinearTilesChunksBytes;
}

/// The tiles of a cluster are a group. Clusters take groups in turn: group i lies at group i % token_groups of tokens
/// and i / token_groups of features.
struct LinearTilesPlan {
  LinearTilesShape shape;
  int token_groups, feature_groups;
  int clusters;
  int smem_bytes;  // of a block

  constexpr int groups() const { return token_groups * feature_groups; }
  constexpr int rounds() const { return (groups() + clusters - 1) / clusters; }
};

inline std::string to_string(const LinearTilesPlan& p) {
  return plan_text({{p.clusters, "clusters"},
                    {p.rounds(), "rounds"},
                    {p.token_groups, "token groups"},
                    {p.feature_groups, "feature groups"},
                    {p.shape.width, "features a tile"},
                    {p.smem_bytes, "B of shared memory"}}) +
         (p.shape.in_turn ? ", warpgroups in turn" : ", warpgroups share tiles");
}

/// The layout of a product by tiles of one shape. All clusters have their SMs at once.
constexpr LinearTilesPlan linear_tiles_layout(const Arch& arch, std::int64_t tokens, std::int64_t out,
                                              const LinearTilesShape& shape) {
  const auto groups = [](std::int64_t size, int group) { return int((size + group - 1) / group); };
  LinearTilesPlan p{.shape = shape,
                    .token_groups = groups(tokens, shape.token_blocks() * kLinearTilesTokenRows),
                    .feature_groups = groups(out, shape.feature_blocks() * shape.width),
                    .clusters = arch.sm_count / kLinearTilesBlocks,
                    .smem_bytes = linear_tiles_smem_bytes(shape.width)};
  if (p.clusters > p.groups()) p.clusters = p.groups();
  return p;
}

/// The shape whose rounds have fewer features in all. Where they have as many, warpgroups take tiles in turn: one's
/// epilogue then runs beside the other's products, and the tensor cores wait for the last round's epilogue alone.
constexpr LinearTilesPlan linear_tiles_plan(const Arch& arch, std::int64_t tokens, std::int64_t out) {
  const LinearTilesPlan shared = linear_tiles_layout(arch, tokens, out, kLinearTilesShared),
                        in_turn = linear_tiles_layout(arch, tokens, out, kLinearTilesInTurn);
  const auto features = [](const LinearTilesPlan& p) { return p.rounds() * p.shape.width; };
  return features(shared) < features(in_turn) ? shared : in_turn;
}

}  // namespace cf::cuda
