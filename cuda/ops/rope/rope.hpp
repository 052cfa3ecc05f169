#pragma once
#include <algorithm>
#include <cstdint>

#include "core/host_device.hpp"
#include "cuda/ops/token_plan.hpp"
#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

/// What a thread of rope and of rope_append takes: the same 16 bytes of each head of a group of consecutive heads.
struct RopeUnit {
  int group;
  int part;    // 0, 1 or 2 for q, k or v
  int vector;  // of a head's q, k or v
  bool turns;  // whether rotated elements may lie in the vector
};

/// How the kernels of rope and rope_append divide a token's units. Those that turn come first: few warps have any.
struct RopePlan {
  int heads;  // of a group: 1 or 4, a template argument of the kernels
  int groups;
  int vectors;       // of a head's q, k or v
  int turning;       // the leading vectors of q and k that turn, in whole 32 bytes where a head has them
  TokenPlan blocks;  // of the units

  CF_HD constexpr int units() const { return groups * 3 * vectors; }
  CF_HD constexpr RopeUnit unit(int index) const {
    const unsigned turning_units = unsigned(groups * 2 * turning), in_group = unsigned(2 * turning);
    if (unsigned(index) < turning_units) {
      const int group = int(unsigned(index) / in_group), nth = index - group * int(in_group), part = nth >= turning;
      return {group, part, nth - part * turning, true};
    }
    const int plain = vectors - turning, rest = 2 * plain + vectors;
    const int group = int((unsigned(index) - turning_units) / unsigned(rest));
    const int nth = index - int(turning_units) - group * rest;
    const int part = nth < plain ? 0 : nth < 2 * plain ? 1 : 2;
    return {group, part, nth - part * plain + (part < 2 ? turning : 0), false};
  }
};

/// Blocks that an SM has registers for at least, by the heads of a group.
constexpr int rope_blocks_per_sm(int heads) { return heads == 1 ? 8 : 6; }

/// One head a group while all threads are resident at once: the time of a decode step is that of one unit. Four
/// otherwise: more loads in flight for each resident thread.
constexpr RopePlan rope_plan(const Arch& arch, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                             std::int64_t rotary_dim, int elements_in_16_bytes) {
  const std::int64_t vectors = head_dim / elements_in_16_bytes,
                     turning = (rotary_dim + 2 * elements_in_16_bytes - 1) / (2 * elements_in_16_bytes) * 2;
  const bool resident =
      tokens * heads * 3 * vectors <= std::int64_t(arch.sm_count) * rope_blocks_per_sm(1) * kTokenThreads;
  RopePlan p{.heads = resident ? 1 : 4,
             .groups = int(resident ? heads : (heads + 3) / 4),
             .vectors = int(vectors),
             .turning = int(std::min(turning, vectors)),
             .blocks = {}};
  p.blocks = token_plan(p.units());
  return p;
}

}  // namespace cf::cuda
