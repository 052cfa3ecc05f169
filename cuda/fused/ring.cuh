#pragma once
// The ring of stages through which weights and keys stream into a block's shared memory: one warp fills it, in the order
// in which the others empty it.
#include "cuda/fused/block.cuh"

namespace cf::cuda {

/// Addresses in shared memory. Of the products' warps, with one token the first half empties every second stage and the
/// second half the others, with several all empty every stage.
struct Ring {
  const DecodeCall& c;

  __device__ std::uint32_t count() const { return c.plan.stages; }
  __device__ char* stage(std::uint32_t s) const { return decode_smem + c.layout.ring + s * c.plan.stage_bytes; }
  __device__ std::uint64_t* full(std::uint32_t s) const {
    return reinterpret_cast<std::uint64_t*>(decode_smem + c.layout.barriers) + s;
  }
  __device__ std::uint64_t* empty(std::uint32_t s) const { return full(count() + s); }
  __device__ void init(int readers) const {
    for (std::uint32_t s = 0; s < count(); ++s) {
      init_barrier(full(s), 1);
      init_barrier(empty(s), readers);
    }
  }
};

/// A place in the endless sequence of stages.
struct RingPlace {
  std::uint32_t stage = 0, parity = 0;

  __device__ void advance(std::uint32_t count, std::uint32_t by = 1) {
    for (stage += by; stage >= count; stage -= count) parity ^= 1;
  }
};

/// Fills stages. All lanes of one warp call.
class RingWriter {
 public:
  /// `abandoned` says that those who empty the ring have left.
  __device__ RingWriter(const Ring& ring, int in_flight, const volatile int& abandoned)
      : ring_(ring), may_fly_(in_flight), abandoned_(abandoned) {}

  /// The next stage, for so many bytes, when it is free and few enough are in flight; null when nobody empties the ring.
  __device__ char* next(int bytes) {
    while (!try_wait_barrier(ring_.empty(head_.stage), head_.parity ^ 1))
      if (abandoned_) return nullptr;
    if (may_fly_ > 0)
      --may_fly_;
    else
      arrived();
    barrier_ = ring_.full(head_.stage);
    if (threadIdx.x % 32 == 0) arrive_expecting(barrier_, bytes);
    __syncwarp();
    char* const stage = ring_.stage(head_.stage);
    head_.advance(ring_.count());
    return stage;
  }
  /// One lane's part of the stage.
  __device__ void copy(void* to, const void* from, int bytes) const { copy_bulk(to, from, bytes, barrier_); }
  /// Shared memory must not be given back while copies are on their way.
  __device__ void drain() {
    while (tail_.stage != head_.stage || tail_.parity != head_.parity) arrived();
  }

 private:
  /// Waits for the oldest stage that is on its way.
  __device__ void arrived() {
    while (!try_wait_barrier(ring_.full(tail_.stage), tail_.parity)) {
    }
    tail_.advance(ring_.count());
  }

  Ring ring_;
  RingPlace head_, tail_;
  std::uint64_t* barrier_ = nullptr;
  int may_fly_;
  const volatile int& abandoned_;
};

/// Empties every stage, or every second one; each warp has its own. A warp may wait for its next stage while the one before
/// in the same place is still being filled only if that cannot be: the plan has two stages more than may be in flight.
template <int Every>
class RingReader {
 public:
  static_assert(Every == 1 || Every == 2);
  __device__ RingReader(const Ring& ring, int first) : ring_(ring) { place_.advance(ring.count(), first); }

  /// The warp's next stage, or the one so many after it.
  __device__ const char* wait(int ahead = 0) const {
    RingPlace place = place_;
    if (ahead > 0) place.advance(ring_.count(), ahead * Every);
    while (!try_wait_barrier(ring_.full(place.stage), place.parity)) {
    }
    return ring_.stage(place.stage);
  }
  __device__ void release(bool leader) {
    __syncwarp();
    if (leader) arrive(ring_.empty(place_.stage));
    place_.advance(ring_.count(), Every);
  }

 private:
  Ring ring_;
  RingPlace place_;
};

}  // namespace cf::cuda
