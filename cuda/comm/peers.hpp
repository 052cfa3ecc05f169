#pragma once
// What a rank's kernels know of the other ranks: where each rank's exchange memory lies. Without CUDA.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/host_device.hpp"
#include "core/status.hpp"
#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

inline constexpr int kMostRanks = 8;
/// Blocks of a two-shot exchange, each of which has its flags.
inline constexpr int kMostExchangeBlocks = 128;
/// What a thread exchanges at once: 16 bytes, which are sent as two words of eight bytes of data and two epochs.
inline constexpr std::int64_t kLaneBytes = 16, kSentLaneBytes = 32;

/// The most bytes of a part that ranks send each other in one shot. Each rank sends its part to every other: that is
/// more than two shots send, but one hop instead of two and no fence. All ranks have the same number, whatever their
/// GPUs.
constexpr std::int64_t one_shot_bytes(int ranks) {
  return kCompiledTuning.one_shot_bytes / (ranks > 1 ? ranks - 1 : 1);
}

/// The counters of a rank, at the beginning of its exchange memory. The rank's own kernels alone use them.
struct ExchangeState {
  std::uint32_t epoch;   // of the exchange that comes next; never 0, odd and even in turn
  std::uint32_t failed;  // an exchange was given up: those that follow do not wait
  std::uint32_t blocks;  // of the running exchange that are done
};

/// How a rank's exchange memory is divided. All ranks have the same.
///   state  ExchangeState
///   flags  epochs of a two-shot exchange: [2 shots][ranks][kMostExchangeBlocks]
///   words  of one-shot exchanges: [epoch % 2][ranks][one_shot_lanes], data and epochs
///   inbox  a rank's slice of each rank's part: [ranks][slice_lanes]
///   outbox the summed slices: [ranks * slice_lanes]
///   area   what a kernel with exchanges of its own divides for itself, zeros at first
struct ExchangeLayout {
  int ranks = 1;
  std::int64_t one_shot_lanes = 0;  // the most lanes of a one-shot exchange
  std::int64_t slice_lanes = 0;     // the most lanes of a slice of a two-shot exchange
  std::int64_t area_bytes = 0;

  static constexpr std::int64_t kFlags = 256;
  CF_HD constexpr std::int64_t words() const { return kFlags + 2 * ranks * kMostExchangeBlocks * 4; }
  CF_HD constexpr std::int64_t inbox() const { return words() + 2 * ranks * one_shot_lanes * kSentLaneBytes; }
  CF_HD constexpr std::int64_t outbox() const { return inbox() + ranks * slice_lanes * kLaneBytes; }
  constexpr std::int64_t area() const { return (outbox() + ranks * slice_lanes * kLaneBytes + 255) / 256 * 256; }
  constexpr std::int64_t bytes() const { return area() + area_bytes; }
};

/// A rank and its peers, as a kernel is given them.
struct Peers {
  int rank = 0;
  bool share_device = false;  // ranks of one GPU: a kernel that waits leaves the SMs to the other ranks' kernels
  ExchangeLayout layout{};
  std::byte* memory[kMostRanks]{};  // each rank's exchange memory, at this rank's addresses
  std::uint64_t* report = nullptr;  // in the host's memory: the exchange that was given up, or 0
  std::uint64_t patience_ns = 0;    // how long a kernel waits for another rank
  // In the host's memory, one for each rank: what the area's kernels of that rank have given up; 0 for nothing. All
  // ranks have the same.
  std::uint32_t* area_reports = nullptr;
  // Of the host: what the area is divided for, as its first kernel has said; 0 until then. All ranks have the same.
  std::atomic<std::int64_t>* area_use = nullptr;
  /// On the host: a barrier of the threads that drive the ranks. Null where one thread drives all of them.
  const std::function<Status()>* meet = nullptr;
};

}  // namespace cf::cuda
