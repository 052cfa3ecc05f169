#pragma once
#include <algorithm>
#include <cstdint>

#include "core/host_device.hpp"
#include "core/ops/rope.hpp"
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/run_table.hpp"
#include "cuda/ops/token_plan.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// What a thread of rope and of rope_append takes: the same 16 bytes of each head of a group of consecutive heads of q,
/// of k or of v.
struct RopeUnit {
  int group;
  int part;    // 0, 1 or 2 for q, k or v
  int vector;  // of a head's q, k or v
  bool turns;  // whether rotated elements may lie in the vector
};

/// How the kernels of rope and rope_append divide a token's units. Units that rotate come first, so that few warps have
/// units of both kinds.
struct RopePlan {
  int heads;         // of a group: 1 or 4, a template argument of the kernels
  int groups;        // of q's heads
  int kv_groups;     // of k's heads, and of v's
  int vectors;       // of a head's q, k or v
  int turning;       // the leading vectors of q and k that rotate, in whole 32 bytes where a head has them
  TokenPlan blocks;  // of the units

  CF_HD constexpr int units() const { return (groups + 2 * kv_groups) * vectors; }
  template <ops::QkvLayout Layout>
  CF_HD constexpr RopeUnit unit(int index) const {
    return Layout == ops::QkvLayout::separate ? separate_unit(index) : interleaved_unit(index);
  }

 private:
  /// The units of one group of q, k and v, then those of the next. There are as many groups of each.
  CF_HD constexpr RopeUnit interleaved_unit(int index) const {
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
  /// The units of q, then those of k, then those of v.
  CF_HD constexpr RopeUnit separate_unit(int index) const {
    const int turning_units = (groups + kv_groups) * turning, plain = vectors - turning;
    const bool turns = index < turning_units;
    const int nth = turns ? index : index - turning_units, of_head = turns ? turning : plain;
    if (nth >= (groups + kv_groups) * of_head) {
      const int of_v = nth - (groups + kv_groups) * of_head, group = int(unsigned(of_v) / unsigned(vectors));
      return {group, 2, of_v - group * vectors, false};
    }
    const int group = int(unsigned(nth) / unsigned(of_head)), part = group >= groups;
    return {group - part * groups, part, nth - group * of_head + (turns ? 0 : turning), turns};
  }
};

inline std::string to_string(const RopePlan& p) {
  return plan_text({{p.heads, "heads a thread"}, {p.units(), "units a token"}, {p.turning, "turning vectors a head"}}) +
         ", " + to_string(p.blocks);
}

/// Blocks that an SM has registers for at least, by the heads of a group.
constexpr int rope_blocks_per_sm(int heads) { return heads == 1 ? 8 : 6; }

/// One head a group while all threads are resident at once: the time of a decode step is that of one unit. Four
/// otherwise: more loads in flight for each resident thread.
constexpr RopePlan rope_plan(const Arch& arch, std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads,
                             std::int64_t head_dim, std::int64_t rotary_dim, int elements_in_16_bytes) {
  const std::int64_t vectors = head_dim / elements_in_16_bytes,
                     turning = (rotary_dim + 2 * elements_in_16_bytes - 1) / (2 * elements_in_16_bytes) * 2;
  const bool resident =
      tokens * (heads + 2 * kv_heads) * vectors <= std::int64_t(arch.sm_count) * rope_blocks_per_sm(1) * kTokenThreads;
  const auto groups = [&](std::int64_t n) { return int(resident ? n : (n + 3) / 4); };
  RopePlan p{.heads = resident ? 1 : 4,
             .groups = groups(heads),
             .kv_groups = groups(kv_heads),
             .vectors = int(vectors),
             .turning = int(std::min(turning, vectors)),
             .blocks = {}};
  p.blocks = token_plan(p.units());
  return p;
}

/// All refuse a head_dim that is not a multiple of 8. rope_append takes as many tokens of each sequence to a contiguous
/// cache, rope_append_runs runs of any counts to a cache of any kind.
Result<RopePlan> plan_rope(const Target&, const ops::Rope::Args&);
Result<RopePlan> plan_rope_append(const Target&, const ops::RopeAppend::Args&);
Result<TableLaunches<RopePlan>> plan_rope_append_runs(const Target&, const ops::RopeAppend::Args&);
Status launch_rope(const ops::Rope::Args&, const RopePlan&, LaunchList&);
Status launch_rope_append(const ops::RopeAppend::Args&, const RopePlan&, LaunchList&);
Status launch_rope_append_runs(const ops::RopeAppend::Args&, const TableLaunches<RopePlan>&, LaunchList&);

}  // namespace cf::cuda
