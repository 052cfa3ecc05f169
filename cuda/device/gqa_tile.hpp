#pragma once
// GQA tiles: query heads that attend together to keys and values that are loaded once. Compiled with or without nvcc.
#include <algorithm>

namespace cf::cuda {

/// Query heads of a GQA tile, at most: an operand of the tensor cores has eight rows or columns for them.
inline constexpr int kMaxGqaHeads = 8;

/// Query heads of each GQA tile where `group` query heads read one kv head: the largest divisor of the group up to
/// kMaxGqaHeads, so that equal tiles make up the group.
constexpr int gqa_tile_heads(int group) {
  int heads = std::min(group, kMaxGqaHeads);
  while (group % heads) --heads;
  return heads;
}

}  // namespace cf::cuda
