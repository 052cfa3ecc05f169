#pragma once
// A ring: stages in shared memory that a producer fills and consumers empty, in turn. A stage has barriers: a phase of
// `full` ends when the stage's copies have arrived, a phase of `empty` when every consumer is done with it.

namespace cf::cuda {

/// Where a producer or consumer stands in a ring: its stage, and the parity of that stage's current phase.
struct RingSlot {
  int stage = 0, parity = 0;

  __device__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// next(), `steps` times.
  __device__ void skip(int steps, int stages) {
    stage += steps;
    parity ^= stage / stages & 1;
    stage %= stages;
  }
};

}  // namespace cf::cuda
