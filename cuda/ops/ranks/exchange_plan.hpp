#pragma once
// What the kernels of exchanges between ranks share: their plan, what they refuse, and the peers of a list's context.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/comm/peers.hpp"
#include "cuda/ops/kernel.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// How many threads share an exchange.
struct ExchangePlan {
  std::int64_t blocks;
  int threads;
  int shots;  // hops between the ranks, one after the other; 0 where all parts lie here
};

inline std::string to_string(const ExchangePlan& p) {
  const std::string text = plan_text({{p.blocks, "blocks"}, {p.threads, "threads"}});
  return p.shots == 0 ? text : text + (p.shots == 1 ? ", one shot" : ", two shots");
}

/// A thread for each item, in blocks of `threads`.
inline ExchangePlan plan_items(std::int64_t items, int threads, int shots) {
  return {.blocks = (items + threads - 1) / threads, .threads = threads, .shots = shots};
}

/// The lanes of this rank's part, whose rows are multiples of `row_bytes`. Refuses calls with the parts of several ranks,
/// too many ranks, and rows that are no number of lanes.
template <class Args>
Result<std::int64_t> lanes_of(const Args& a, std::int64_t row_bytes) {
  const std::string name(Args::Op::name);
  if (a.x.shape[0] != 1) return not_taken("this rank's part", std::to_string(a.x.shape[0]) + " parts");
  if (a.ranks > kMostRanks)
    return Status::error(Code::unimplemented, name + ": cuda takes up to " + std::to_string(kMostRanks) +
                                                  " ranks, got " + std::to_string(a.ranks));
  if (row_bytes % kLaneBytes)
    return Status::error(Code::unimplemented, name + ": cuda takes parts of a multiple of " +
                                                  std::to_string(kLaneBytes) + " bytes, got " +
                                                  std::to_string(row_bytes));
  return a.x.bytes() / kLaneBytes;
}

/// The plan of an exchange in one shot. Refuses parts for which two shots are faster.
template <class Args>
Result<ExchangePlan> plan_words(const Args& a, std::int64_t lanes) {
  if (const std::int64_t most = one_shot_bytes(int(a.ranks)); a.x.bytes() > most)
    return not_taken("up to " + std::to_string(most) + " bytes", std::to_string(a.x.bytes()));
  // Few threads a block: a token's lanes lie on several SMs, whose stores go out side by side.
  return plan_items(lanes, 128, 1);
}

/// The plan of an exchange in two shots. Where the stores are few, a block's flags cost more than its share of them:
/// small parts have few blocks.
inline ExchangePlan plan_slices(const Target& target, std::int64_t lanes) {
  int blocks = kMostExchangeBlocks;
  for (const ExchangeBlocks& of_small : target.arch.tuning->two_shot_blocks)
    if (lanes * kLaneBytes <= of_small.most_bytes) blocks = std::min(blocks, of_small.blocks);
  return {.blocks = std::min(blocks, target.arch.sm_count), .threads = 512, .shots = 2};
}

/// The peers of a list's context. Refuses a context that is no rank's, has another number of ranks than the call, or
/// memory for fewer than so many lanes.
template <class Args>
Result<Peers> peers_of(const Args& a, std::int64_t lanes, std::int64_t (*most_lanes)(const ExchangeLayout&),
                       const LaunchList& launches) {
  const Peers* const peers = launches.peers();
  const int ranks = peers ? peers->layout.ranks : 1;
  if (!peers || ranks != a.ranks)
    return bad_argument(Args::Op::name, "ranks: expected the " + std::to_string(ranks) + " of the context, got " +
                                            std::to_string(a.ranks));
  if (const std::int64_t most = most_lanes(peers->layout); lanes > most)
    return bad_argument(Args::Op::name, "'x' has " + std::to_string(lanes * kLaneBytes) + " bytes, expected at most " +
                                            std::to_string(most * kLaneBytes) + ", what the ranks can exchange");
  return *peers;
}

}  // namespace cf::cuda
