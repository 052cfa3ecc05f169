#include "cuda/ops/all_reduce/all_reduce.hpp"

#include <algorithm>

#include "cuda/comm/peers.hpp"

namespace cf::cuda {
namespace {

std::int64_t blocks_of(std::int64_t items, int threads) { return (items + threads - 1) / threads; }

/// Refuses a part that is not a number of lanes, of activations that no kernel has; else the number of lanes.
Result<std::int64_t> lanes_of(const ops::AllReduce::Args& a) {
  CF_TRY(check_activation(ops::AllReduce::name, a.y.dtype));
  if (a.x.shape[0] != 1) return not_taken("this rank's part", std::to_string(a.x.shape[0]) + " parts");
  if (a.ranks > kMostRanks)
    return Status::error(Code::unimplemented, "all_reduce: cuda takes up to " + std::to_string(kMostRanks) +
                                                  " ranks, got " + std::to_string(a.ranks));
  const std::int64_t bytes = a.y.bytes();
  if (bytes % kLaneBytes)
    return Status::error(Code::unimplemented,
                         "all_reduce: cuda takes parts of a multiple of 16 bytes, got " + std::to_string(bytes));
  return bytes / kLaneBytes;
}

}  // namespace

Result<AllReducePlan> plan_all_reduce_parts(const Target&, const ops::AllReduce::Args& a) {
  CF_TRY(check_activation(ops::AllReduce::name, a.y.dtype));
  if (a.x.shape[0] != a.ranks) return not_taken("the parts of all ranks", "this rank's");
  constexpr int threads = 256;
  return AllReducePlan{.blocks = blocks_of(a.y.size(), threads), .threads = threads, .shots = 0};
}

Result<AllReducePlan> plan_all_reduce_words(const Target&, const ops::AllReduce::Args& a) {
  CF_TRY_ASSIGN(const std::int64_t lanes, lanes_of(a));
  if (const std::int64_t most = one_shot_bytes(int(a.ranks)); a.y.bytes() > most)
    return not_taken("up to " + std::to_string(most) + " bytes", std::to_string(a.y.bytes()));
  // Few threads a block: a token's lanes lie on several SMs, whose stores go out side by side.
  constexpr int threads = 128;
  return AllReducePlan{.blocks = blocks_of(lanes, threads), .threads = threads, .shots = 1};
}

Result<AllReducePlan> plan_all_reduce_slices(const Target& target, const ops::AllReduce::Args& a) {
  CF_TRY_ASSIGN(const std::int64_t lanes, lanes_of(a));
  // A block's flags cost more than its share of the stores where there are few: 32 blocks are the fastest up to 1 MB, 64
  // for 4 MB, 128 for 20 MB.
  constexpr std::int64_t mb = (1 << 20) / kLaneBytes;
  const int blocks = lanes <= 2 * mb ? 32 : lanes <= 8 * mb ? 64 : kMostExchangeBlocks;
  return AllReducePlan{.blocks = std::min(blocks, target.arch.sm_count), .threads = 512, .shots = 2};
}

}  // namespace cf::cuda
