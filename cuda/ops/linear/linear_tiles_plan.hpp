#pragma once
// How the product of more than 128 tokens with a 16-bit weight matrix is laid out for Hopper's tensor cores.
#include <algorithm>
#include <cstdint>

#include "core/dtype.hpp"
#include "cuda/ops/linear/linear_wgmma_plan.hpp"
#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

/// Up to this many tokens; cuBLASLt keeps the products of more. No number of tokens is known at which cuBLASLt is the
/// faster one.
inline constexpr std::int64_t kLinearTilesTokens = std::int64_t(1) << 24;

/// Whether a product goes to Hopper's tensor cores in this way, where the device has them.
constexpr bool is_linear_tiles(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t out,
                               DType activation, bool packed) {
  return arch.compute_capability == 90 && !packed && tokens > kLinearWgmmaTokens && tokens <= kLinearTilesTokens &&
         in % 8 == 0 && out % 8 == 0 && (activation == DType::f16 || activation == DType::bf16);
}

/// A tile is kLinearTilesTokenRows tokens and `width` features: the product's rows and columns. The two warpgroups of a
/// block share a tile, or take tiles in turn, so that one finishes its sums while the tensor cores work for the other.
/// The last tile's sums are finished by both.
struct LinearTilesShape {
  int width;
  bool in_turn;
};
/// The shapes that are compiled. Each is a kernel for either dtype, so there are few.
inline constexpr LinearTilesShape kLinearTilesShapes[] = {
    {256, false}, {240, false}, {160, false}, {160, true}, {128, true}};

inline constexpr int kLinearTilesTokenRows = kLinearWgmmaTileRows, kLinearTilesWarps = 8;

/// A warp's sums go through shared memory in chunks: 16 tokens, 32 features, in float32.
inline constexpr int kLinearTilesChunk = 32, kLinearTilesChunkFloats = 16 * kLinearTilesChunk;
constexpr int linear_tiles_chunks(int features) { return (features + kLinearTilesChunk - 1) / kLinearTilesChunk; }
inline constexpr int kLinearTilesChunksBytes = kLinearTilesWarps * kLinearTilesChunkFloats * 4;

/// The stages of a block's ring. A stage is what linear_wgmma_stage_bytes() says, for `width` rows of the weight and a
/// tile's tokens. Beside the ring a block has its chunks, and its barriers and the bias as static memory.
constexpr int linear_tiles_stages(int width) {
  constexpr int align_bytes = 1024, static_bytes = 2304;
  return (kH200.smem_per_block_bytes - align_bytes - static_bytes - kLinearTilesChunksBytes) /
         linear_wgmma_stage_bytes(width);
}
constexpr int linear_tiles_smem_bytes(int width) {
  return 1024 + linear_tiles_stages(width) * linear_wgmma_stage_bytes(width) + kLinearTilesChunksBytes;
}

/// The tiles of a cluster: token_blocks times feature_blocks of them, each by `splits` blocks, which divide its columns
/// of x and of the weight among them and add up their sums in rank order. Blocks with the same tokens share their
/// copies of x, those with the same features their copies of the weight. Clusters take groups of tiles in turn: group i
/// lies at group i % token_groups of tokens and i / token_groups of features.
struct LinearTilesPlan {
  LinearTilesShape shape;
  int token_blocks, feature_blocks, splits;
  int token_groups, feature_groups;
  int clusters;
  int smem_bytes;  // of a block

  constexpr int cluster_blocks() const { return token_blocks * feature_blocks * splits; }
  constexpr int groups() const { return token_groups * feature_groups; }
};

/// Clusters that have their SMs at once. The blocks of one lie on SMs of one group of 16 or more.
constexpr int linear_tiles_resident(const Arch& arch, int cluster_blocks) {
  constexpr int group_sms = 16;
  return cluster_blocks <= 2 ? arch.sm_count / cluster_blocks
                             : arch.sm_count / group_sms * (group_sms / cluster_blocks);
}

/// The bytes of the sums that a block receives from its tile's blocks. They lie where the ring was.
constexpr int linear_tiles_parts_bytes(int width, int splits) {
  return splits * kLinearTilesWarps * linear_tiles_chunks(width / splits) * kLinearTilesChunkFloats * 4;
}

/// Whether a cluster may be made like this. Copies are shared in pieces of whole eights of rows. A tile whose columns
/// are divided has its sums in the place of the ring: its blocks take no second tile.
constexpr bool linear_tiles_fit(const Arch& arch, const LinearTilesShape& shape, int token_blocks, int feature_blocks,
                                int splits, std::int64_t groups) {
  const int blocks = token_blocks * feature_blocks * splits;
  if (blocks > arch.max_cluster_blocks || shape.width / token_blocks % 8) return false;
  return splits == 1 ||
         (!shape.in_turn && shape.width / 8 % splits == 0 && groups <= linear_tiles_resident(arch, blocks) &&
          linear_tiles_parts_bytes(shape.width, splits) <=
              linear_tiles_stages(shape.width) * linear_wgmma_stage_bytes(shape.width));
}

/// The layout of a product with these clusters.
constexpr LinearTilesPlan linear_tiles_layout(const Arch& arch, std::int64_t tokens, std::int64_t out,
                                              const LinearTilesShape& shape, int token_blocks, int feature_blocks,
                                              int splits) {
  const auto groups = [](std::int64_t size, int group) { return (size + group - 1) / group; };
  LinearTilesPlan p{.shape = shape,
                    .token_blocks = token_blocks,
                    .feature_blocks = feature_blocks,
                    .splits = splits,
                    .token_groups = int(groups(tokens, token_blocks * kLinearTilesTokenRows)),
                    .feature_groups = int(groups(out, feature_blocks * shape.width)),
                    .clusters = 0,
                    .smem_bytes = linear_tiles_smem_bytes(shape.width)};
  p.clusters = std::min(p.groups(), linear_tiles_resident(arch, p.cluster_blocks()));
  return p;
}

/// The estimated cycles of a product. A step of a tile, kLinearWgmmaColumns columns, takes the tensor cores four cycles
/// a feature, or the L2 the time of its bytes: 27 a cycle and SM, with which 128 x 128 tiles without sharing reach 400
/// TFLOP/s on an H200. A tile's end is counted in the instructions of an SM's four schedulers: about 10 cycles a
/// feature, and 48 more with GELU; one warpgroup alone takes up to twice as long.
constexpr std::int64_t linear_tiles_cycles(const LinearTilesPlan& p, std::int64_t in, bool has_gelu) {
  constexpr std::int64_t l2_bytes_a_cycle = 27, start = 2000, hand_over = 500, merge = 2500;
  const std::int64_t steps = (in + kLinearWgmmaColumns - 1) / kLinearWgmmaColumns,
                     rounds = (p.groups() + p.clusters - 1) / p.clusters, width = p.shape.width;
  const std::int64_t rows = kLinearTilesTokenRows / p.feature_blocks + width / p.token_blocks;
  const std::int64_t step = std::max(4 * width, rows * kLinearWgmmaColumns * 2 / l2_bytes_a_cycle);
  const std::int64_t tile = (steps + p.splits - 1) / p.splits * step, end = (has_gelu ? 58 : 10) * width;
  if (p.shape.in_turn) return start + hand_over + (rounds - 1) * std::max(tile, 2 * end) + tile + end;
  return start + rounds * (tile + end / p.splits) + (p.splits > 1 ? merge : 0);
}

/// The layout of the fewest cycles.
constexpr LinearTilesPlan linear_tiles_plan(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t out,
                                            bool has_gelu) {
  constexpr std::int64_t least_steps = 8;  // of a split
  LinearTilesPlan best{};
  std::int64_t best_cycles = 0;
  for (const LinearTilesShape& shape : kLinearTilesShapes)
    for (int splits = 1; splits <= 4; splits *= 2)
      for (int token_blocks = 1; token_blocks <= 4; token_blocks *= 2)
        for (int feature_blocks = 1; feature_blocks <= 4; feature_blocks *= 2) {
          if (splits > 1 && in / kLinearWgmmaColumns < splits * least_steps) continue;
          const LinearTilesPlan p = linear_tiles_layout(arch, tokens, out, shape, token_blocks, feature_blocks, splits);
          if (!linear_tiles_fit(arch, shape, token_blocks, feature_blocks, splits, p.groups())) continue;
          const std::int64_t cycles = linear_tiles_cycles(p, in, has_gelu);
          if (best_cycles && cycles >= best_cycles) continue;
          best = p;
          best_cycles = cycles;
        }
  return best;
}

}  // namespace cf::cuda
