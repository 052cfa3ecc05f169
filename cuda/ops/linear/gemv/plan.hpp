#pragma once
#include <algorithm>
#include <cstdint>

#include "core/status.hpp"
#include "cuda/ops/token_launches.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// How a GEMV with a weight matrix of 16-bit elements is laid out. A tile is eight rows of W. A
/// block's warps divide the columns of a tile among them in steps of 32. A warp keeps the weights and activations of
/// `depth` steps in flight in registers, also across the end of a tile.
struct GemvPlan {
  int depth;          // 16-byte loads of W that a lane has in flight; 0 for float32 activations
  int blocks_per_sm;  // resident at once
  int grid;           // tile i belongs to block i % grid
};

inline std::string to_string(const GemvPlan& p) {
  return plan_text({{p.grid, "blocks"}, {p.blocks_per_sm, "blocks an SM"}, {p.depth, "loads ahead"}});
}

inline constexpr int kTileRows = 8, kStepColumns = 32, kMmaTokens = 16, kGemvWarps = 8;
inline constexpr int kGemvThreads = 32 * kGemvWarps;

/// How many blocks an SM's registers have room for. With more than 8 tokens a lane holds the activations of two tokens.
/// On Blackwell a block needs more registers, and an SM fewer bytes in flight.
constexpr int gemv_blocks_per_sm(int compute_capability, bool two_tokens_a_lane) {
  return two_tokens_a_lane || is_blackwell(compute_capability) ? 2 : kCompiledTuning.gemv_blocks_per_sm;
}

/// The depth is 5 where 5 divides a warp's steps and a lane holds one token, else 4. Three blocks of eight warps at
/// depth 5 have 60 KB of weights in flight an SM.
constexpr GemvPlan gemv_plan(const Arch& arch, long in, long out, long tokens) {
  const long steps = (in + kStepColumns - 1) / kStepColumns, a_warp = (steps + kGemvWarps - 1) / kGemvWarps;
  const int blocks = gemv_blocks_per_sm(arch.compute_capability, tokens > 8);
  // Every block takes the same number of tiles or one fewer, so that no block works alone on a last tile.
  const long tiles = (out + kTileRows - 1) / kTileRows, slots = long(arch.sm_count) * blocks;
  const long a_block = (tiles + slots - 1) / slots;
  return {.depth = tokens <= 8 && a_warp % 5 == 0 ? 5 : 4,
          .blocks_per_sm = blocks,
          .grid = int((tiles + a_block - 1) / a_block)};
}

/// The plan with float32 activations, for y of `out` columns: a warp takes an element of y.
constexpr GemvPlan gemv_f32_plan(std::int64_t out) {
  return {.depth = 0, .blocks_per_sm = 2, .grid = int((out + kGemvWarps - 1) / kGemvWarps)};
}

using GemvLaunches = TokenLaunches<GemvPlan>;

/// Calls f(first, count) for every launch of linear's own kernels with a dense weight, which takes tokens [first,
/// first + count), and stops at the first Status that is not ok.
template <class F>
Status for_each_gemv_launch(std::int64_t tokens, F&& f) {
  for (std::int64_t first = 0; first < tokens; first += kMmaTokens)
    CF_TRY(f(first, std::min<std::int64_t>(kMmaTokens, tokens - first)));
  return {};
}

}  // namespace cf::cuda
