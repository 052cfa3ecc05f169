#pragma once
// The ring: stages in shared memory that the stream warp fills with weights, keys and values, in the order in which the
// product warps empty them.
#include "cuda/persistent/block.cuh"

namespace cf::cuda {

/// A stage of the ring in one round of its filling: where the barrier that says it is full lies in the block's shared
/// memory, where the stage lies, and the round's parity.
struct RingPlace {
  std::uint32_t full, stage, parity;
};

/// The ring's addresses in shared memory. With one token, product warps 0 to 3 empty every second stage and warps 4 to
/// 7 the others. With several tokens or packed weights, all product warps empty every stage.
class Ring {
 public:
  __device__ explicit Ring(const PersistentArguments& c)
      : end_of_full_(shared_address(block_smem + c.layout.barriers) + c.plan.stages * kBarrier),
        full_bytes_(c.plan.stages * kBarrier),
        stage_bytes_(c.plan.stage_bytes),
        bytes_(c.plan.stages * c.plan.stage_bytes),
        first_stage_(shared_address(block_smem + c.layout.ring)) {}

  __device__ RingPlace place(std::uint32_t stage, std::uint32_t parity = 0) const {
    return {end_of_full_ - full_bytes_ + stage * kBarrier, first_stage_ + stage * stage_bytes_, parity};
  }
  /// The barrier that says the stage is empty.
  __device__ std::uint32_t empty(const RingPlace& p) const { return p.full + full_bytes_; }
  /// Moves the place on by `by` stages, at most one round.
  __device__ void advance(RingPlace& p, std::uint32_t by) const {
    p.full += by * kBarrier, p.stage += by * stage_bytes_;
    if (p.full < end_of_full_) return;
    p.full -= full_bytes_, p.stage -= bytes_, p.parity ^= 1;
  }
  __device__ void init(int readers) const {
    for (RingPlace p = place(0); p.parity == 0; advance(p, 1)) {
      init_barrier(p.full, 1);
      init_barrier(empty(p), readers);
    }
  }

 private:
  static constexpr std::uint32_t kBarrier = sizeof(std::uint64_t);
  std::uint32_t end_of_full_, full_bytes_, stage_bytes_, bytes_, first_stage_;
};

/// Fills stages. All lanes of the stream warp call. What it does for a stage bounds how fast the product warps can
/// catch up after a wait, so it is few instructions: the places are kept as addresses, and both waits are one loop.
class RingWriter {
 public:
  /// `product_warps` counts the product warps that have not left. At 0 nobody empties the ring any more. Warps do not
  /// leave together: each may have rows of its own in the last product.
  __device__ RingWriter(const Ring& ring, const volatile int& product_warps, const PersistentPlan& plan)
      : ring_(ring), head_(ring.place(0)), oldest_(head_), product_warps_(product_warps), plan_(plan) {}

  /// From now on so many stages may be in flight: requested, but not arrived.
  __device__ void allow(int stages_in_flight) {
    more_ += stages_in_flight - allowed_;
    allowed_ = stages_in_flight;
  }
  /// Waits until the next stage is free and fewer stages are in flight than allowed. That stage is then filled by
  /// bring(), or by expect() and copy(). False where nobody empties the ring any more. This is the wait for stages of
  /// keys and of packed weights. It does not prefetch: with one more copy of that loop nvcc 13.0 spills registers.
  __device__ bool next() {
    const bool awaits = awaits_oldest();
    while (!(try_wait_barrier(ring_.empty(head_), head_.parity ^ 1) &
             (!awaits || try_wait_barrier(oldest_.full, oldest_.parity))))
      if (product_warps_ == 0) return false;
    take_next(awaits);
    return true;
  }
  /// The same wait for a stage of dense weights. While the ring is full, it prefetches the stages that follow:
  /// prefetch(0) requests the next stage, prefetch(k) the k-th stage after it. prefetch(k) returns false where the
  /// product has no such stage.
  template <class Prefetch>
  __device__ bool next(Prefetch prefetch) {
    const bool awaits = awaits_oldest();
    bool can_prefetch = ahead_ < plan_.ahead_stages;
    // try_wait_barrier() may sleep longer than a prefetch is due in.
    for (unsigned last = unsigned(clock());;) {
      const bool is_free = can_prefetch ? test_barrier(ring_.empty(head_), head_.parity ^ 1)
                                        : try_wait_barrier(ring_.empty(head_), head_.parity ^ 1);
      if (is_free && (!awaits || try_wait_barrier(oldest_.full, oldest_.parity))) break;
      if (product_warps_ == 0) return false;
      if (is_free || !can_prefetch || unsigned(clock()) - last < unsigned(plan_.ahead_clocks)) continue;
      const bool has = prefetch(ahead_);
      ahead_ += has;
      can_prefetch = has && ahead_ < plan_.ahead_stages;
      last = unsigned(clock());
    }
    ahead_ = max(ahead_ - 1, 0);
    take_next(awaits);
    return true;
  }
  /// Requests the whole stage.
  __device__ void bring(const void* from, int bytes) const { request_bulk(at_.stage, from, bytes, at_.full); }
  /// The stage is to have `bytes` bytes.
  __device__ void expect(int bytes) const {
    if (threadIdx.x % 32 == 0) arrive_expecting(at_.full, bytes);
    __syncwarp();
  }
  /// Requests a copy to a part of the stage; one lane calls.
  __device__ void copy(int offset, const void* from, int bytes) const {
    copy_bulk(at_.stage + offset, from, bytes, at_.full);
  }
  /// Waits for all stages in flight: a block must not leave while copies to its shared memory are in flight.
  __device__ void drain() {
    while (oldest_.full != head_.full || oldest_.parity != head_.parity) await_oldest();
  }

 private:
  /// Whether a stage in flight must arrive before the next one is requested.
  __device__ bool awaits_oldest() {
    for (; more_ < 0; ++more_) await_oldest();
    return more_ == 0;
  }
  /// Makes the next stage the one to fill. `has_awaited`: the oldest stage in flight has arrived.
  __device__ void take_next(bool has_awaited) {
    if (has_awaited)
      ring_.advance(oldest_, 1);
    else
      --more_;
    at_ = head_;
    ring_.advance(head_, 1);
  }
  __device__ void await_oldest() {
    while (!try_wait_barrier(oldest_.full, oldest_.parity)) {
    }
    ring_.advance(oldest_, 1);
  }

  Ring ring_;
  RingPlace head_, oldest_, at_{};  // the next stage, the oldest one in flight, the one that is being filled
  int allowed_ = 0, more_ = 0;      // stages that may be in flight, and how many of these are not
  int ahead_ = 0;                   // stages that were prefetched: the next stage and those behind it
  const volatile int& product_warps_;
  const PersistentPlan& plan_;
};

/// Empties every stage, or every second one; each warp has a reader. A stage is filled in one round after another, and
/// the parity of its barrier tells a round from the one before, not from older ones. So a warp must not wait for a
/// round of a stage while the round before, which may be for other warps, is in flight. It never does: the stage two
/// positions earlier has arrived, and at most count - 2 stages are in flight.
template <int Every>
class RingReader {
 public:
  static_assert(Every == 1 || Every == 2);
  __device__ RingReader(const Ring& ring, int first) : ring_(ring), place_(ring.place(first)) {}

  /// Waits for the warp's next stage, or for the one that is `ahead` stages of the warp later. Returns its address.
  __device__ std::uint32_t wait(int ahead = 0) const {
    RingPlace place = place_;
    if (ahead > 0) ring_.advance(place, ahead * Every);
    while (!try_wait_barrier(place.full, place.parity)) {
    }
    return place.stage;
  }
  /// Gives the warp's next stage back to the writer.
  __device__ void release(bool leader) {
    __syncwarp();
    if (leader) arrive(ring_.empty(place_));
    ring_.advance(place_, Every);
  }

 private:
  Ring ring_;
  RingPlace place_;
};

}  // namespace cf::cuda
