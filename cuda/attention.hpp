#pragma once
#include <cstdint>

#include "cuda/arch.hpp"

namespace cf::cuda {

/// How decode attention divides its work. Plans are values; the kernel computes the same for any of them.
struct AttentionPlan {
  int splits;  // of a query's keys, each a block; they form one cluster: 1, 2, 4 or 8
};

/// `queries` = batch * q_len * heads. Enough splits to give every SM two blocks, as long as a split keeps 32 keys.
constexpr AttentionPlan attention_plan(const Arch& arch, std::int64_t queries, std::int64_t max_kv_len) {
  int splits = 1;
  while (splits < arch.max_cluster_blocks && queries * splits < 2 * arch.sm_count && max_kv_len > splits * 32)
    splits *= 2;
  return {.splits = splits};
}

}  // namespace cf::cuda
