#pragma once
#include <vector>

#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"

namespace cf {

// The layout of GptqTiles, which tensor cores' fragments ask for (mma.m16n8k16 with the weights as its 16 x 16
// operand):
//
//   Columns are the inputs sorted by group, every group in columns_per_group columns, a multiple of 32: column c belongs
//   to group c / columns_per_group and to input order[c]. A column without an input (-1) has any code: its activation
//   counts as zero. Without an order column k is input k.
//   A code of 8 bits is two of 4: W = 16 s (q / 16 - z / 16) + s (q % 16 - z % 16). The high ones are groups of their own,
//   those of the low ones follow, so that every input has two columns.
//
//   codes   tile (i, j) holds rows 16i .. 16i + 15 and columns 64j .. 64j + 63 in 512 bytes, of which lane l of a warp has
//           bytes 16l .. 16l + 15. With g = l / 4 and t = l % 4 these are four words: row g, columns 8t .. 8t + 7; row
//           g + 8, the same columns; row g, columns 32 + 8t .. ; row g + 8, those. Of a word's eight columns 0, 4, 2, 6, 1,
//           5, 3, 7 come in this order, low bits first: pairs of columns lie 16 bits apart, where a pair of 16-bit numbers
//           goes, and one mask finds the first two pairs.
//   scales  (i, group, r): row 16i + r / 2 + 8 (r % 2)'s float16 scale in the low half of a word, its zero as a float16
//           in the high half.
//   Rows that the matrix does not have are zero.

/// A matrix's tiles in memory of their own.
struct OwnedGptqTiles {
  GptqTiles tiles;
  std::vector<Tensor> storage;
};

/// Repacks a matrix once, when it is loaded; the tiles' row r is the matrix's row pairs.row(r). Refuses a g_idx outside
/// the groups, and scales of 8-bit codes whose sixteenfold no float16 holds. The weight's tensors fit each other.
Result<OwnedGptqTiles> repack_gptq(const GptqWeight& w, RopePairs pairs = {});

}  // namespace cf
