#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

/// How the rope kernel divides its work: a block takes `heads` heads of one token, with `threads` threads for each of
/// q, k and v.
struct RopePlan {
  int heads;    // 1 or 4, a template argument of the kernel
  int threads;  // whole warps
};

inline constexpr int kMaxRopeThreads = 320;

/// How many leading elements of a head have a thread each: the rotated ones, rounded up to whole 16 bytes of any dtype.
/// The pairs (i, i + rotary_dim / 2) need no alignment.
constexpr int rope_singles(int rotary_dim) { return (rotary_dim + 7) / 8 * 8; }

/// Threads that a head's q, k or v keeps busy: one for each single element, one for each 16 bytes of the rest.
constexpr int rope_units(int head_dim, int singles, int elements_in_16_bytes) {
  return singles + (head_dim - singles) / elements_in_16_bytes;
}

/// One head for each thread while all threads are resident at once: the time of a decode step is that of one rotation.
/// Four otherwise: more loads in flight for each resident thread.
constexpr RopePlan rope_plan(const Arch& arch, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                             std::int64_t rotary_dim, int elements_in_16_bytes) {
  const int units = rope_units(int(head_dim), rope_singles(int(rotary_dim)), elements_in_16_bytes);
  const int threads = std::min((units + 31) / 32 * 32, kMaxRopeThreads);
  const bool resident = tokens * heads * 3 * threads <= std::int64_t(arch.sm_count) * arch.threads_per_sm;
  return {.heads = resident ? 1 : 4, .threads = threads};
}

}  // namespace cf::cuda
