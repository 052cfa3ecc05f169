#pragma once
// Shares: query heads that attend together to keys and values that are loaded once. Compiled with or without nvcc.
#include <algorithm>

namespace cf::cuda {

/// Query heads of a share, at most: an operand of the tensor cores has eight rows or columns for them.
inline constexpr int kMaxShareHeads = 8;

/// Query heads of each share where `group` query heads read one kv head: the largest divisor of the group up to
/// kMaxShareHeads, so that equal shares make up the group.
constexpr int largest_share(int group) {
  int heads = std::min(group, kMaxShareHeads);
  while (group % heads) --heads;
  return heads;
}

}  // namespace cf::cuda
