#pragma once
// Products with fp8 weights: how a launch is laid out. Without CUDA's headers.
#include <cstdint>
#include <string>

#include "core/fp8.hpp"
#include "core/status.hpp"
#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

// A tile is 16 rows of W. A block's warps take its columns in turn, in chunks of 128. Where each block of 128 x 128 has
// a scale, a chunk is a group.
inline constexpr int kFp8TileRows = 16, kFp8Columns = 128;

/// How many chunks of a warp are in flight. A lane loads a chunk with four loads of 16 bytes. With more than 8 tokens a
/// lane holds the activations of two tokens, and its registers have room for fewer chunks.
constexpr int fp8_depth(bool two_tokens_a_lane) { return two_tokens_a_lane ? 1 : 2; }
inline constexpr int kFp8BlocksPerSm = 2;  // as many as an SM's registers have room for

/// The plan of a launch. Each block takes the same number of tiles, or one fewer.
constexpr GemvPlan fp8_gemv_plan(const Arch& arch, std::int64_t rows, std::int64_t tokens) {
  const std::int64_t tiles = (rows + kFp8TileRows - 1) / kFp8TileRows,
                     slots = std::int64_t(arch.sm_count) * kFp8BlocksPerSm;
  const std::int64_t a_block = (tiles + slots - 1) / slots;
  return {.depth = 4 * fp8_depth(tokens > 8),
          .blocks_per_sm = kFp8BlocksPerSm,
          .grid = int((tiles + a_block - 1) / a_block)};
}

/// Why tensor cores do not multiply by an fp8 matrix. Empty where they do: a lane loads 16 codes of a row, and a chunk
/// of columns has one scale a row.
constexpr std::string_view why_no_fp8_mma(const Fp8Weight& w, DType activation) {
  if (activation != DType::f16 && activation != DType::bf16) return "takes 16-bit activations";
  if (w.in % 16) return "takes rows of a multiple of 16";
  return w.groups() == 1 || w.group_size == kFp8Columns ? "" : "takes a scale for a row, or for 128 columns of a row";
}

// Many tokens: a tile is 128 tokens and 128 rows of W. Its columns come in stages of 64.
inline constexpr int kFp8TileTokens = 128, kFp8TileOfRows = 128, kFp8StageColumns = 64, kFp8Stages = 4;
/// The codes of a stage, and behind them its activations of 16 bits.
inline constexpr int kFp8StageBytes = kFp8StageColumns * (kFp8TileOfRows + kFp8TileTokens * 2);

/// The blocks of a tile of tokens read neighbouring rows of W at the same time.
struct Fp8TilesPlan {
  std::int64_t token_tiles, row_tiles;
};

inline std::string to_string(const Fp8TilesPlan& p) {
  return plan_text({{p.token_tiles, "tiles of tokens"}, {p.row_tiles, "tiles of rows"}, {kFp8Stages, "stages"}});
}

constexpr Fp8TilesPlan fp8_tiles_plan(std::int64_t tokens, std::int64_t rows) {
  return {(tokens + kFp8TileTokens - 1) / kFp8TileTokens, (rows + kFp8TileOfRows - 1) / kFp8TileOfRows};
}

}  // namespace cf::cuda
