#pragma once
// The ring: stages in shared memory that the stream warp fills with weights, keys and values, in the order in which the
// product warps empty them.
#include "cuda/persistent/block.cuh"

namespace cf::cuda {

/// The ring's addresses in shared memory. With one token, product warps 0 to 3 empty every second stage and warps 4 to
/// 7 the others. With several tokens, all product warps empty every stage.
struct Ring {
  const PersistentArguments& c;

  __device__ std::uint32_t count() const { return c.plan.stages; }
  __device__ char* stage(std::uint32_t s) const { return block_smem + c.layout.ring + s * c.plan.stage_bytes; }
  __device__ std::uint64_t* full(std::uint32_t s) const {
    return reinterpret_cast<std::uint64_t*>(block_smem + c.layout.barriers) + s;
  }
  __device__ std::uint64_t* empty(std::uint32_t s) const { return full(count() + s); }
  __device__ void init(int readers) const {
    for (std::uint32_t s = 0; s < count(); ++s) {
      init_barrier(full(s), 1);
      init_barrier(empty(s), readers);
    }
  }
};

/// A position in the endless sequence of stages.
struct RingPosition {
  std::uint32_t stage = 0, parity = 0;

  __device__ void advance(std::uint32_t count, std::uint32_t by = 1) {
    for (stage += by; stage >= count; stage -= count) parity ^= 1;
  }
};

/// Fills stages. All lanes of the stream warp call.
class RingWriter {
 public:
  /// `product_warps_left` becomes true when nobody empties the ring any more.
  __device__ RingWriter(const Ring& ring, int stages_in_flight, const volatile int& product_warps_left)
      : ring_(ring), may_request_(stages_in_flight), product_warps_left_(product_warps_left) {}

  /// Waits until the next stage is free and fewer than stages_in_flight stages are in flight. Returns the stage, which
  /// then expects copies of `bytes` bytes; null where nobody empties the ring any more.
  __device__ char* next(int bytes) {
    while (!try_wait_barrier(ring_.empty(head_.stage), head_.parity ^ 1))
      if (product_warps_left_) return nullptr;
    if (may_request_ > 0)
      --may_request_;
    else
      wait_for_oldest();
    barrier_ = ring_.full(head_.stage);
    if (threadIdx.x % 32 == 0) arrive_expecting(barrier_, bytes);
    __syncwarp();
    char* const stage = ring_.stage(head_.stage);
    head_.advance(ring_.count());
    return stage;
  }
  /// Requests a copy to a part of the stage; one lane calls.
  __device__ void copy(void* to, const void* from, int bytes) const { copy_bulk(to, from, bytes, barrier_); }
  /// Waits for all stages in flight: a block must not leave while copies to its shared memory are in flight.
  __device__ void drain() {
    while (tail_.stage != head_.stage || tail_.parity != head_.parity) wait_for_oldest();
  }

 private:
  /// Waits for the oldest stage in flight.
  __device__ void wait_for_oldest() {
    while (!try_wait_barrier(ring_.full(tail_.stage), tail_.parity)) {
    }
    tail_.advance(ring_.count());
  }

  Ring ring_;
  RingPosition head_, tail_;
  std::uint64_t* barrier_ = nullptr;
  int may_request_;
  const volatile int& product_warps_left_;
};

/// Empties every stage, or every second one; each warp has a reader. A stage is filled in one round after another, and
/// the parity of its barrier tells a round from the one before, not from older ones. So a warp must not wait for a
/// round of a stage while the round before, which may be for other warps, is in flight. It never does: the stage two
/// positions earlier has arrived, and at most count - 2 stages are in flight.
template <int Every>
class RingReader {
 public:
  static_assert(Every == 1 || Every == 2);
  __device__ RingReader(const Ring& ring, int first) : ring_(ring) { position_.advance(ring.count(), first); }

  /// Waits for the warp's next stage, or for the one that is `ahead` stages of the warp later.
  __device__ const char* wait(int ahead = 0) const {
    RingPosition position = position_;
    if (ahead > 0) position.advance(ring_.count(), ahead * Every);
    while (!try_wait_barrier(ring_.full(position.stage), position.parity)) {
    }
    return ring_.stage(position.stage);
  }
  /// Gives the warp's next stage back to the writer.
  __device__ void release(bool leader) {
    __syncwarp();
    if (leader) arrive(ring_.empty(position_.stage));
    position_.advance(ring_.count(), Every);
  }

 private:
  Ring ring_;
  RingPosition position_;
};

}  // namespace cf::cuda
