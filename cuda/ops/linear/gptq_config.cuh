#pragma once
// What gptq_block() is compiled for.
#include <type_traits>

#include "cuda/ops/linear/linear_gptq.hpp"

namespace cf::cuda {

struct GptqConfig {
  GptqTokens tokens;  // the most that it takes
  int turns;          // warps of a part, as in the plan
  bool half_chunks;   // a group may end in the middle of a chunk
  bool near_x;        // x lies in shared memory
  int rows;           // consecutive rows of a token that make an element of the epilogue: 1, 2 or 4

  constexpr int threads() const { return gptq_threads(turns); }
  constexpr bool one_token() const { return tokens == GptqTokens::one; }
  /// Octets of tokens: a product has eight columns.
  constexpr int octets() const { return tokens == GptqTokens::sixteen ? 2 : 1; }
  /// Whether a warp holds its slice of x in registers.
  constexpr bool x_in_registers() const { return octets() == 1 && !half_chunks; }
  /// Whether one token's activations are added up beside the first tile's products, which needs registers.
  constexpr bool sums_x_late() const { return one_token() && turns == 1; }
  /// How many elements a thread prepares before x is there: as many as registers have room for.
  constexpr int prepared() const { return half_chunks ? 0 : one_token() || rows > 1 ? 1 : 2; }
};

/// What the tensor cores multiply where activations are of T: float16 with one token, else T.
template <class T, GptqConfig C>
using GptqOperand = std::conditional_t<C.one_token(), f16, T>;

}  // namespace cf::cuda
