#pragma once
#include "cuda/arch.hpp"

namespace cf::cuda {

/// How the product of a few tokens with a weight matrix of 16-bit elements is laid out. A tile is eight rows of W; a
/// block's warps divide its columns among them in steps of 32, and a warp keeps `depth` steps' weights and activations
/// in flight in registers, over the ends of tiles too.
struct LinearPlan {
  int depth;          // 16-byte loads of W in flight a lane
  int blocks_per_sm;  // resident at once
  int grid;           // blocks, which take the tiles in turn
};

inline constexpr int kTileRows = 8, kStepColumns = 32, kMmaTokens = 16, kLinearWarps = 8;
inline constexpr int kLinearThreads = 32 * kLinearWarps;

/// Blocks an SM that registers leave room for: with more than 8 tokens a lane holds activations of two. A Blackwell SM
/// needs fewer bytes in flight, and its compiler more registers.
constexpr int linear_blocks_per_sm(int compute_capability, bool two_tokens_a_lane) {
  return two_tokens_a_lane || compute_capability >= 120 ? 2 : 3;
}

/// Depth 4 or 5, whichever divides a warp's steps; two tokens a lane leave registers for 4. Three blocks of eight warps
/// at depth 5 put 60 KB of weights in flight an SM, with which an H200 reads a long matrix fastest; two blocks and four
/// are slower.
constexpr LinearPlan linear_plan(const Arch& arch, long in, long out, long tokens) {
  const long steps = (in + kStepColumns - 1) / kStepColumns, a_warp = (steps + kLinearWarps - 1) / kLinearWarps;
  const int blocks = linear_blocks_per_sm(arch.compute_capability, tokens > 8);
  // All blocks take as many tiles, or one fewer: no block is alone with a last one.
  const long tiles = (out + kTileRows - 1) / kTileRows, slots = long(arch.sm_count) * blocks;
  const long a_block = (tiles + slots - 1) / slots;
  return {.depth = tokens <= 8 && a_warp % 5 == 0 ? 5 : 4,
          .blocks_per_sm = blocks,
          .grid = int((tiles + a_block - 1) / a_block)};
}

}  // namespace cf::cuda
