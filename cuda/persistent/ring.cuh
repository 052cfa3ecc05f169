#pragma once
// The ring: shared memory that the producer warp fills with stages of weights, keys and values, in the order in which
// the consumer warps empty them. The stages of each product have their own size, so that every product fills the ring.
#include "cuda/persistent/block.cuh"

namespace cf::cuda {

/// The stages' barriers in shared memory. Each stage has two: one completes when the stage is full, the other when the
/// stage is empty. A launch numbers its stages. Stages n and n + kMaxRingStages have the same barriers.
///
/// Two groups of warps empty the stages of row products: consumer warps 0 to 3 and consumer warps 4 to 7. The groups
/// take stages in turn. All consumer warps empty every stage of other products.
class Ring {
 public:
  __device__ explicit Ring(const PersistentArguments& c)
      : first_full_(shared_address(block_smem + c.layout.barriers)) {}

  /// Makes the barriers of a stage, for the first kMaxRingStages stages. A stage is empty after `readers` arrivals.
  __device__ void init(unsigned stage, int readers) const {
    init_barrier(full(stage), 1);
    init_barrier(empty(stage), readers);
  }
  __device__ std::uint32_t full(unsigned stage) const { return first_full_ + stage % kMaxRingStages * kBarrier; }
  __device__ std::uint32_t empty(unsigned stage) const { return full(stage) + kMaxRingStages * kBarrier; }
  __device__ bool is_full(unsigned stage) const { return test_barrier(full(stage), parity(stage)); }
  __device__ bool is_empty(unsigned stage) const { return test_barrier(empty(stage), parity(stage)); }
  /// Wait a short while. True where the stage is full, or empty.
  __device__ bool try_wait_full(unsigned stage) const { return try_wait_barrier(full(stage), parity(stage)); }
  __device__ bool try_wait_empty(unsigned stage) const { return try_wait_barrier(empty(stage), parity(stage)); }
  __device__ void wait_full(unsigned stage) const {
    while (!try_wait_full(stage)) {
    }
  }

 private:
  static constexpr unsigned kBarrier = sizeof(std::uint64_t);
  static __device__ unsigned parity(unsigned stage) { return stage / kMaxRingStages % 2; }

  std::uint32_t first_full_;
};

/// Fills stages. All lanes of the producer warp call. What it does for a stage bounds how fast the consumer warps can
/// catch up after a wait, so it is few instructions.
///
/// A segment is consecutive stages of one kind. Its first stage lies in the first slot of that kind behind the stage
/// before (RingStage::first_slot()).
class RingWriter {
 public:
  /// `consumer_warps` counts the consumer warps that have not left. At 0 nobody empties the ring any more. Warps do not
  /// leave together: each may have rows of its own in the last product.
  __device__ RingWriter(const Ring& ring, const volatile int& consumer_warps, const PersistentArguments& c)
      : ring_(ring),
        consumer_warps_(consumer_warps),
        plan_(c.plan),
        begin_(shared_address(block_smem + c.layout.ring)) {}

  /// From now on stages are of this kind.
  __device__ void begin(const RingStage& kind) {
    more_ += kind.in_flight - allowed_;
    allowed_ = kind.in_flight;
    if (kind.bytes() == stage_bytes_) return;
    if (is_round_) blocker_ = next_ - unsigned(slots_);
    stage_bytes_ = kind.bytes(), slots_ = kind.slots, in_segment_ = 0, is_round_ = false;
    const int at = kind.first_slot(at_) * stage_bytes_;
    if (at < at_) passed_ += unsigned(plan_.ring_bytes);
    at_ = at;
  }
  /// Waits until there is room for the next stage and fewer stages are in flight than allowed. That stage is then
  /// filled by bring(), or by expect() and copy(). False where nobody empties the ring any more. This is the wait for
  /// stages of keys and of packed weights. It does not prefetch: with one more copy of that loop nvcc 13.0 spills
  /// registers.
  __device__ bool next() {
    const bool awaits = awaits_oldest();
    if (!is_ready(awaits))
      for (bool blocked = find_blocker();;) {
        if ((!blocked || ring_.try_wait_empty(blocker_)) & (!awaits || ring_.try_wait_full(oldest_)))
          if (!(blocked = is_blocked_still(blocked))) break;
        if (consumer_warps_ == 0) return false;
      }
    take_next(awaits);
    return true;
  }
  /// The same wait for a stage of dense weights. While the ring is full, it prefetches the stages that follow:
  /// prefetch(0) requests the next stage, prefetch(k) the k-th stage after it. prefetch(k) returns false where the
  /// product has no such stage.
  template <class Prefetch>
  __device__ bool next(Prefetch prefetch) {
    const bool awaits = awaits_oldest();
    if (!is_ready(awaits)) {
      const unsigned wait = unsigned(stage_bytes_ * plan_.ahead_clocks) / 1024;
      bool can_prefetch = ahead_ < plan_.ahead_stages, blocked = find_blocker();
      // try_wait_barrier() may sleep longer than a prefetch is due in.
      for (unsigned last = unsigned(clock());;) {
        const bool is_free = !blocked || (can_prefetch ? ring_.is_empty(blocker_) : ring_.try_wait_empty(blocker_));
        if (is_free && (!awaits || ring_.try_wait_full(oldest_)))
          if (!(blocked = is_blocked_still(blocked))) break;
        if (consumer_warps_ == 0) return false;
        if (is_free || !can_prefetch || unsigned(clock()) - last < wait) continue;
        const bool has = prefetch(ahead_);
        ahead_ += has;
        can_prefetch = has && ahead_ < plan_.ahead_stages;
        last = unsigned(clock());
      }
    }
    ahead_ = max(ahead_ - 1, 0);
    take_next(awaits);
    return true;
  }
  /// Requests the whole stage.
  __device__ void bring(const void* from, int bytes) const { request_bulk(stage_, from, bytes, full_); }
  /// The stage is to have `bytes` bytes.
  __device__ void expect(int bytes) const {
    if (threadIdx.x % 32 == 0) arrive_expecting(full_, bytes);
    __syncwarp();
  }
  /// Requests a copy to a part of the stage; one lane calls.
  __device__ void copy(int offset, const void* from, int bytes) const {
    copy_bulk(stage_ + offset, from, bytes, full_);
  }
  /// Waits for all stages in flight: a block must not leave while copies to its shared memory are in flight.
  __device__ void drain() {
    while (oldest_ != next_) await_oldest();
  }

 private:
  /// Whether a stage in flight must arrive before the next one is requested.
  __device__ bool awaits_oldest() {
    for (; more_ < 0; ++more_) await_oldest();
    return more_ == 0;
  }
  __device__ void await_oldest() {
    ring_.wait_full(oldest_);
    ++oldest_;
  }
  /// A quick look whether the next stage can be requested. False where stages of earlier segments may lie in its slot.
  __device__ bool is_ready(bool awaits) const {
    return is_round_ && ring_.is_empty(next_ - unsigned(slots_)) & (!awaits || ring_.is_full(oldest_));
  }
  /// Sets blocker_ to the stage that must be empty before the next stage is requested. False where there is none.
  __device__ bool find_blocker() {
    if (!is_round_) return is_blocked();
    blocker_ = next_ - unsigned(slots_);
    return true;
  }
  /// Whether the blocker lies in the next stage's slot. Then it begins before the end of that slot, one round of the
  /// ring earlier.
  __device__ bool is_blocked() const {
    const unsigned from = __shfl_sync(~0u, from_, int(blocker_ % kMaxRingStages)),
                   end_before = passed_ + unsigned(at_ + stage_bytes_ - plan_.ring_bytes);
    return blocker_ != next_ && int(from - end_before) < 0;
  }
  /// The blocker has become empty: the stage behind it is the next blocker. True where that stage, too, lies in the
  /// next stage's slot.
  __device__ bool is_blocked_still(bool blocked) {
    if (!blocked) return false;
    ++blocker_;
    return !is_round_ && is_blocked();
  }
  /// Makes the next stage the one to fill. `has_awaited`: the oldest stage in flight has arrived.
  __device__ void take_next(bool has_awaited) {
    if (has_awaited)
      ++oldest_;
    else
      --more_;
    if (next_ % kMaxRingStages == threadIdx.x % 32) from_ = passed_ + unsigned(at_);
    stage_ = begin_ + unsigned(at_), full_ = ring_.full(next_);
    at_ += stage_bytes_;
    if (at_ == slots_ * stage_bytes_) at_ = 0, passed_ += unsigned(plan_.ring_bytes);
    ++next_, ++in_segment_;
    if (!is_round_) is_round_ = in_segment_ >= slots_ && int(blocker_ + unsigned(in_segment_) - next_) >= 0;
  }

  Ring ring_;
  const volatile int& consumer_warps_;
  const PersistentPlan& plan_;
  const std::uint32_t begin_;           // of the ring
  std::uint32_t stage_ = 0, full_ = 0;  // where the stage that is being filled lies, and its barrier
  unsigned next_ = 0, oldest_ = 0;      // the next stage, and the oldest one in flight
  unsigned blocker_ = 0;                // unless is_round_, all stages before it are empty
  int stage_bytes_ = 0, slots_ = 0,
      in_segment_ = 0;  // of the segment: the bytes of a slot, the slots, the stages so far
  // Whether the segment has had all its slots, and all stages of earlier segments are empty. The next stage then waits
  // for one stage alone: for that of the same segment that had its slot.
  bool is_round_ = false;
  int at_ = 0;                  // where in the ring the next stage lies
  unsigned passed_ = 0;         // the ring's bytes times the rounds before
  unsigned from_ = 0;           // passed_ + at_ of the last stage that the lane has noted
  int allowed_ = 0, more_ = 0;  // stages that may be in flight, and how many of these are not
  int ahead_ = 0;               // stages that were prefetched: the next stage and those behind it
};

/// Empties every stage, or every second one. Each warp has a reader.
///
/// A barrier's parity tells stage n from stage n - kMaxRingStages, but not from older stages. So no warp may wait for
/// stage n while stage n - kMaxRingStages is in flight. No warp does: stage n - 2 has been requested before, and at
/// most kMaxRingStages - 2 stages are in flight at once.
///
/// The writer does not say where a stage lies. A reader finds the slots as the writer does: both get the same kinds of
/// stages in the same order.
template <int Every>
class RingReader {
 public:
  static_assert(Every == 1 || Every == 2);
  __device__ RingReader(const PersistentArguments& arguments, int first)
      : c(arguments), stage_(unsigned(first)), next_(first) {}

  /// The number of the warp's next stage, 0 or 1. Number 0 is the first stage behind the last end().
  __device__ int first() const { return next_ % kLine; }
  /// The next stages are of this kind. Called as often as RingWriter::begin().
  __device__ void begin(const RingStage& kind) {
    stage_bytes_ = kind.bytes(), bytes_ = kind.slots * stage_bytes_;
    at_ = kind.first_slot(next_) * stage_bytes_;
    next_ = at_ + first();
    if (first() > 0) at_ = at_behind(1);
  }
  /// The warp has emptied its stages of a product or of attention. `first` becomes first().
  __device__ void end(int first) {
    next_ = (first == 0 ? at_ : at_ > 0 ? at_ - stage_bytes_ : bytes_ - stage_bytes_) + first;
  }
  /// Waits for the warp's next stage. Returns its address.
  __device__ std::uint32_t wait() const {
    Ring(c).wait_full(stage_);
    return shared_address(block_smem) + c.layout.ring + at_;
  }
  /// Waits for the stage that the warp empties after its next one. Returns that stage's address.
  __device__ std::uint32_t wait_second() const {
    RingReader second = *this;
    second.advance();
    return second.wait();
  }
  /// Gives the warp's next stage back to the writer.
  __device__ void release(bool leader) {
    __syncwarp();
    if (leader) arrive(Ring(c).empty(stage_));
    advance();
  }

 private:
  static constexpr int kLine = RingStage::kLineBytes;
  __device__ int at_behind(int stages) const {
    const int at = at_ + stages * stage_bytes_;
    return at < bytes_ ? at : at - bytes_;
  }
  __device__ void advance() { at_ = at_behind(Every), stage_ += Every; }

  const PersistentArguments& c;
  unsigned stage_;                            // the warp's next one
  int at_ = 0, stage_bytes_ = 0, bytes_ = 0;  // where that stage lies; the bytes of a slot and of all slots
  // Between products: where in the ring the next stage of all warps may begin, a multiple of kLine, plus first(). One
  // register holds both.
  int next_;
};

}  // namespace cf::cuda
