#pragma once
// The compile-time parameters of gptq_block().
#include "cuda/ops/linear/packed/plan.hpp"

namespace cf::cuda {

struct GptqConfig {
  GptqTokens tokens;            // the most that it takes
  int turns;                    // warps of a part, as in the plan
  bool half_chunks;             // a group may end in the middle of a chunk
  bool near_x;                  // x lies in shared memory
  int rows;                     // consecutive rows of a token that make an element of the epilogue: 1, 2 or 4
  int chunks = kGptqMaxChunks;  // the most of a slice

  constexpr int threads() const { return gptq_threads(turns); }
  constexpr bool one_token() const { return tokens == GptqTokens::one; }
  /// Octets of tokens: a product has eight columns.
  constexpr int octets() const { return (int(tokens) + 7) / 8; }
  /// The wide kernel of long parts: every slice is `chunks` chunks.
  constexpr bool in_quads() const { return octets() > 1 && chunks == kGptqQuad; }
  /// Whether a warp holds its slice of x in registers.
  constexpr bool x_in_registers() const { return !half_chunks; }
  /// How many elements of y a thread prepares before x has arrived: as many as its registers have room for.
  constexpr int prepared() const { return half_chunks ? 0 : one_token() || rows > 1 ? 1 : 2; }
};

/// What the kernels of linear, LinearSum, RmsLinear and RmsQkv are compiled for.
constexpr GptqConfig linear_gptq_config(GptqTokens tokens, bool half_chunks, int rows, int chunks) {
  return {.tokens = tokens,
          .turns = kLinearGptqTurns,
          .half_chunks = half_chunks,
          .near_x = false,
          .rows = rows,
          .chunks = chunks};
}

}  // namespace cf::cuda
