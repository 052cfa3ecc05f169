// A block chooses the token of one slot, as the sampler does, and exchanges with the same block of the other ranks.
#include "cuda/ops/ranks/choose.hpp"

#include <string>

#include "core/rank_choice.hpp"
#include "cuda/comm/exchange.cuh"
#include "cuda/ops/sample/choose.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

using namespace choice;

constexpr std::string_view kName = "choose";

/// The highest key of all ranks, in the first warp: each rank's is a lane of its part.
__device__ std::uint64_t highest_of_ranks(const PeerExchange& exchange, long slot, std::uint64_t own) {
  const int peer = lane_index();
  const bool is_other = peer < exchange.ranks() && peer != exchange.rank();
  std::uint64_t key = own;
  if (is_other) exchange.send(peer, slot, {std::uint32_t(own), std::uint32_t(own >> 32), 0, 0});
  if (is_other) {
    const uint4 theirs = exchange.receive(peer, slot);
    key = std::uint64_t(theirs.y) << 32 | theirs.x;
  }
  return warp_max(key);
}

/// y = the ranks' parts of a slot's row side by side, by way of the inboxes. A row of a part has `lanes` lanes.
__device__ void gather_row(const PeerExchange& exchange, const uint4* part, uint4* y, long slot, long lanes) {
  const int ranks = exchange.ranks(), rank = exchange.rank();
  const long first = slot * lanes;
  for (int d = 1; d < ranks; ++d) {
    uint4* const inbox = exchange.inbox((rank + d) % ranks, rank, first);
    for (long i = threadIdx.x; i < lanes; i += kThreads) inbox[i] = part[first + i];
  }
  for (long i = threadIdx.x; i < lanes; i += kThreads) y[rank * lanes + i] = part[first + i];
  exchange.meet(0);
  for (int d = 1; d < ranks; ++d) {
    const int from = (rank + d) % ranks;
    const uint4* const inbox = exchange.inbox(rank, from, first);
    for (long i = threadIdx.x; i < lanes; i += kThreads) y[from * lanes + i] = __ldcg(inbox + i);
  }
  exchange.meet(1);  // the inboxes are read: the next exchange may fill them
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    choose_kernel(const __grid_constant__ RankChoiceArgs a, const __grid_constant__ Peers peers) {
  begin_exchange(peers);
  __shared__ Shared shared;
  const long slot = blockIdx.x, width = a.part.shape[1];
  const SlotSampling& settings = a.choice.settings[slot];
  const bool chooses = settings.chooses != 0;
  std::int32_t chosen = kNoToken;
  if (!chooses || takes_highest(settings)) {
    // An idle slot's block exchanges a word, too: whoever begins an exchange has seen the others in the one before.
    const Row<T> part{.logits = static_cast<const T*>(a.part.data) + slot * width,
                      .vocab = std::int32_t(width),
                      .seen = nullptr,
                      .repetition_penalty = 1,
                      .temperature = 1};
    const std::uint64_t own = chooses ? highest_key<true>(shared, part) : 0;
    if (warp_index() == 0) {
      const std::uint64_t highest =
          highest_of_ranks(PeerExchange(peers), slot, sampling::key_among_all(own, std::int32_t(peers.rank * width)));
      const std::int32_t id = sampling::id_of_highest(highest, kNoToken);
      // After an exchange that was given up a word may be anything.
      if (a.choice.positions[slot] >= 0 && id >= 0 && id < a.logits.shape[1]) chosen = id;
    }
  } else {
    const long lanes = width * long(sizeof(T)) / kLaneBytes;
    gather_row(PeerExchange(peers), static_cast<const uint4*>(a.part.data),
               static_cast<uint4*>(a.logits.data) + slot * lanes * peers.layout.ranks, slot, lanes);
    chosen = choose(shared, row_of<T>(a.choice, slot), settings, a.choice.positions[slot]);
  }
  // A barrier lies between every thread's last score and the choice.
  if (chooses && threadIdx.x == 0) tell(a.choice, slot, chosen);
  // A new object loads the epoch again: kept meanwhile, the epoch would take a register of every thread.
  PeerExchange(peers).end();
}

Status check_part(const RankChoiceArgs& a, const LaunchList& launches) {
  const auto [slots, vocab] = a.logits.shape;
  const Peers* const peers = launches.peers();
  if (!peers) return bad_argument(kName, "expected a rank's context, got one that is no rank's");
  const int ranks = peers->layout.ranks;
  if (vocab % ranks)
    return bad_argument(kName, std::to_string(ranks) + " ranks must divide vocab, got " + std::to_string(vocab));
  TensorCheck shapes(kName);
  DeviceCheck places(kName, launches.device(), kLaneBytes);
  for (const auto& f : {std::pair{"part", a.part}, {"logits", ConstAnyView<2>(a.logits)}}) {
    const auto shape = extents(slots, f.first == std::string_view("part") ? vocab / ranks : vocab);
    shapes(TensorSpec{Role::input, f.first}, f.second, shape);
    places(TensorSpec{Role::input, f.first}, f.second, shape);
  }
  CF_TRY(shapes.status());
  CF_TRY(places.status());
  if (a.part.dtype != a.logits.dtype)
    return bad_argument(kName, "'part' has dtype " + std::string(to_string(a.part.dtype)) + ", expected " +
                                   std::string(to_string(a.logits.dtype)) + " as 'logits'");
  const std::int64_t row_bytes = a.part.shape[1] * std::int64_t(size_bytes(a.part.dtype));
  if (row_bytes % kLaneBytes)
    return Status::error(Code::unimplemented, std::string(kName) + ": cuda takes parts with rows of a multiple of " +
                                                  std::to_string(kLaneBytes) + " bytes, got " +
                                                  std::to_string(row_bytes));
  const ExchangeLayout& l = peers->layout;
  const std::int64_t most =
      std::min({l.one_shot_lanes, std::int64_t(kMostExchangeBlocks), l.slice_lanes * kLaneBytes / row_bytes});
  if (slots > most)
    return bad_argument(kName, "expected up to the " + std::to_string(most) +
                                   " slots whose logits the ranks can exchange, got " + std::to_string(slots));
  return {};
}

}  // namespace

Status prepare(const RankChoiceArgs& args, LaunchList& launches) {
  RankChoiceArgs a = args;
  a.choice.logits = a.logits;
  CF_TRY(check(a.choice, launches));
  CF_TRY(check_part(a, launches));
  return with_activation(kName, a.logits.dtype, [&](auto zero) {
    return launch(kName, launches, {.grid = unsigned(a.logits.shape[0]), .block = kThreads},
                  choose_kernel<decltype(zero)>, a, *launches.peers());
  });
}

}  // namespace cf::cuda
