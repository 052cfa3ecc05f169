#pragma once
// What the products on Hopper's tensor cores share: a block's ring.
#include "cuda/device/wgmma.cuh"
#include "cuda/ops/linear/wgmma/plan.hpp"

namespace cf::cuda {

/// A block's stages in shared memory, each with two barriers. A stage holds kLinearWgmmaTileRows rows of operand a, in
/// Bits bits an element, and Rows rows of operand b.
template <int Rows, int Bits = 16>
struct WgmmaRing {
  static constexpr int a_bytes = linear_wgmma_weight_bytes(Bits), stage_bytes = linear_wgmma_stage_bytes(Rows, Bits);
  unsigned char* first;   // at a multiple of 1024 bytes
  std::uint64_t* filled;  // a phase ends when a step's copies have arrived
  std::uint64_t* free;    // a phase ends when every consumer warp is done with a step
  int stages;

  __device__ unsigned char* a(int stage) const { return first + stage * stage_bytes; }
  __device__ unsigned char* b(int stage) const { return a(stage) + a_bytes; }
};

/// A step's stage, and the parity of the phase that the step has of the stage's barriers.
struct WgmmaPlace {
  int stage = 0, parity = 0;
  __device__ void next(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
  /// next(), `steps` times.
  __device__ void skip(int steps, int stages) {
    stage += steps;
    parity ^= stage / stages & 1;
    stage %= stages;
  }
};

}  // namespace cf::cuda
