#pragma once
// The exchanges between ranks, as device code. Every rank launches the same exchanges in the same order.
//
// One-shot: each rank stores its part into all ranks' memory as words that carry the exchange's epoch, waits for the
// words of the others and sums all parts in the order of the ranks. Each lane waits for its own words alone. A word is
// stored at once with its epoch, so no fence is needed.
// Two-shot: each rank sums one slice of all ranks' parts and stores it into all ranks' memory. Block b of a rank waits
// for block b of the others, with a flag of each.
//
// Words lie in one of two halves, by the epoch. A rank that stores words of epoch e has seen the others' words of
// e - 1: each of them has begun e - 1, so that its kernel of e - 2, which read the same half, is complete.
#include "cuda/comm/peers.hpp"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"

namespace cf::cuda {

/// How a kernel that waits for other ranks begins. It holds its successors back where these run on the same GPU: blocks
/// that have started early keep the SMs from the other ranks' kernels.
__device__ inline void begin_exchange(const Peers& peers) {
  if (!peers.share_device) let_successor_start();
  wait_for_predecessors();
}

/// A rank's end of one exchange.
class PeerExchange {
 public:
  /// The kernels before this one are complete.
  __device__ explicit PeerExchange(const Peers& peers) : peers_(peers), state_(state()) {
    epoch_ = load_relaxed(&state_->epoch);
    waits_ = load_relaxed(&state_->failed) == 0;
  }

  __device__ int rank() const { return peers_.rank; }
  __device__ int ranks() const { return peers_.layout.ranks; }

  /// Stores a lane of this rank's part into the words of another rank.
  __device__ void send(int to, long lane, const uint4& data) const {
    std::byte* const words = peers_.memory[to] + words_of(rank(), lane);
    store_words_to_peer(words, {data.x, epoch_, data.y, epoch_});
    store_words_to_peer(words + 16, {data.z, epoch_, data.w, epoch_});
  }
  /// Waits for a lane of another rank's part.
  __device__ uint4 receive(int from, long lane) const {
    const std::byte* const words = peers_.memory[rank()] + words_of(from, lane);
    uint4 first, second;
    wait(from, [&] {
      first = load_words_of_peer(words), second = load_words_of_peer(words + 16);
      return ((first.y ^ epoch_) | (first.w ^ epoch_) | (second.y ^ epoch_) | (second.w ^ epoch_)) == 0;
    });
    return {first.x, first.z, second.x, second.z};
  }

  /// Where a rank's memory has lane `lane` of what rank `from` sends it in the first shot, and a summed lane.
  __device__ uint4* inbox(int of, int from, long lane) const {
    return reinterpret_cast<uint4*>(peers_.memory[of] + peers_.layout.inbox()) + from * peers_.layout.slice_lanes +
           lane;
  }
  __device__ uint4* outbox(int of, long lane) const {
    return reinterpret_cast<uint4*>(peers_.memory[of] + peers_.layout.outbox()) + lane;
  }
  /// Tells the same block of all other ranks that this block has stored all of shot 0 or 1, and waits for theirs.
  __device__ void meet(int shot) const {
    __syncthreads();
    const int peer = int(threadIdx.x);
    if (peer < ranks() && peer != rank()) {
      __threadfence_system();  // the block's stores, which __syncthreads() put before this thread's
      release_to_peer(flag(peer, shot, rank()), epoch_);
      wait(peer, [&] { return acquire_from_peer(flag(rank(), shot, peer)) == epoch_; });
    }
    __syncthreads();
  }

  /// Ends the exchange: the last block sets the epoch of the next one. All threads of the block call it.
  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x > 0 || fetch_add(&state_->blocks, 1) + 1 < gridDim.x) return;
    state_->blocks = 0;
    state_->epoch = epoch_ + 1 == 0 ? 2 : epoch_ + 1;
  }

 private:
  __device__ ExchangeState* state() const { return reinterpret_cast<ExchangeState*>(peers_.memory[peers_.rank]); }
  __device__ std::int64_t words_of(int from, long lane) const {
    const ExchangeLayout& l = peers_.layout;
    return l.words() + ((epoch_ % 2 * l.ranks + from) * l.one_shot_lanes + lane) * kSentLaneBytes;
  }
  __device__ std::uint32_t* flag(int of, int shot, int from) const {
    return reinterpret_cast<std::uint32_t*>(peers_.memory[of] + ExchangeLayout::kFlags) +
           (shot * peers_.layout.ranks + from) * kMostExchangeBlocks + blockIdx.x;
  }
  /// Polls until `here()` is true. Gives the exchange up, and all that follow, when that takes too long.
  template <class Here>
  __device__ void wait(int from, Here here) const {
    constexpr int polls = 256;
    std::uint64_t since = 0;
    while (!here()) {
      if (!waits_) return;
      for (int i = 0; i < polls; ++i)
        if (here()) return;
      const std::uint64_t now = time_ns();
      if (since == 0) since = now;
      if (now - since < peers_.patience_ns && load_relaxed(&state_->failed) == 0) continue;
      store_relaxed(&state_->failed, 1);
      store_for_host(peers_.report, std::uint64_t(epoch_) << 32 | unsigned(from + 1));
      return;
    }
  }

  const Peers& peers_;
  ExchangeState* state_;
  std::uint32_t epoch_;
  bool waits_;
};

/// The sum of one lane over the ranks, in their order and in float32: `part(rank)` is a rank's lane.
template <class T, class Part>
__device__ uint4 sum_of_ranks(int ranks, Part part) {
  constexpr int n = kLane<T>;
  float sum[n], next[n];
  unpack(part(0), sum, T{});
  for (int r = 1; r < ranks; ++r) {
    unpack(part(r), next, T{});
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] += next[i];
  }
  if constexpr (n == 4)
    return reinterpret_cast<const uint4&>(sum);
  else
    return pack_vec<T>(sum);
}

/// y = the ranks' sum of x, by words. A thread has a lane.
template <class T>
__device__ void sum_by_words(const PeerExchange& exchange, const uint4* x, uint4* y, long lanes) {
  const long lane = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (lane < lanes) {
    const uint4 own = x[lane];
    for (int d = 1; d < exchange.ranks(); ++d) exchange.send((exchange.rank() + d) % exchange.ranks(), lane, own);
    y[lane] = sum_of_ranks<T>(exchange.ranks(),
                              [&](int r) { return r == exchange.rank() ? own : exchange.receive(r, lane); });
  }
  exchange.end();
}

/// y = the ranks' sum of x, by slices. x and y may be the same tensor.
template <class T>
__device__ void sum_by_slices(const PeerExchange& exchange, const uint4* x, uint4* y, long lanes) {
  const int ranks = exchange.ranks(), rank = exchange.rank();
  const long slice = (lanes + ranks - 1) / ranks, part = (slice + gridDim.x - 1) / gridDim.x;
  const long first = blockIdx.x * part, last = min(first + part, slice);
  // Calls f(i, lane) for the block's part of a rank's slice: lane i of the slice.
  const auto for_each_lane = [&](int of, auto f) {
#pragma unroll 4
    for (long i = first + threadIdx.x; i < last; i += blockDim.x)
      if (const long lane = of * slice + i; lane < lanes) f(i, lane);
  };
  for (int d = 1; d < ranks; ++d) {
    const int to = (rank + d) % ranks;
    for_each_lane(to, [&](long i, long lane) { *exchange.inbox(to, rank, i) = x[lane]; });
  }
  exchange.meet(0);
  for_each_lane(rank, [&](long i, long lane) {
    const uint4 sum =
        sum_of_ranks<T>(ranks, [&](int r) { return r == rank ? x[lane] : __ldcg(exchange.inbox(rank, r, i)); });
    for (int d = 1; d < ranks; ++d) *exchange.outbox((rank + d) % ranks, lane) = sum;
    y[lane] = sum;
  });
  exchange.meet(1);
  for (int d = 1; d < ranks; ++d)
    for_each_lane((rank + d) % ranks, [&](long, long lane) { y[lane] = __ldcg(exchange.outbox(rank, lane)); });
  exchange.end();
}

/// Where a gather writes rank r's lane: a token has `width` lanes of each rank.
__device__ inline long gathered(long lane, int r, int ranks, long width) {
  return (lane / width * ranks + r) * width + lane % width;
}

/// y = the ranks' x side by side, by words. A thread has a lane.
__device__ inline void gather_by_words(const PeerExchange& exchange, const uint4* x, uint4* y, long lanes, long width) {
  const long lane = long(blockIdx.x) * blockDim.x + threadIdx.x;
  const int ranks = exchange.ranks(), rank = exchange.rank();
  if (lane < lanes) {
    const uint4 own = x[lane];
    for (int d = 1; d < ranks; ++d) exchange.send((rank + d) % ranks, lane, own);
    for (int r = 0; r < ranks; ++r) y[gathered(lane, r, ranks, width)] = r == rank ? own : exchange.receive(r, lane);
  }
  exchange.end();
}

/// y = the ranks' x side by side, by way of the inboxes.
__device__ inline void gather_by_slices(const PeerExchange& exchange, const uint4* x, uint4* y, long lanes,
                                        long width) {
  const int ranks = exchange.ranks(), rank = exchange.rank();
  const long part = (lanes + gridDim.x - 1) / gridDim.x, first = blockIdx.x * part, last = min(first + part, lanes);
  const auto for_each_lane = [&](auto f) {
#pragma unroll 4
    for (long i = first + threadIdx.x; i < last; i += blockDim.x) f(i);
  };
  for (int d = 1; d < ranks; ++d) {
    const int to = (rank + d) % ranks;
    for_each_lane([&](long i) { *exchange.inbox(to, rank, i) = x[i]; });
  }
  for_each_lane([&](long i) { y[gathered(i, rank, ranks, width)] = x[i]; });
  exchange.meet(0);
  for (int d = 1; d < ranks; ++d) {
    const int from = (rank + d) % ranks;
    for_each_lane([&](long i) { y[gathered(i, from, ranks, width)] = __ldcg(exchange.inbox(rank, from, i)); });
  }
  exchange.meet(1);  // the inboxes are read: the next exchange may fill them
  exchange.end();
}

}  // namespace cf::cuda
