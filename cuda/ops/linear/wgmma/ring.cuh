#pragma once
// What the products on Hopper's tensor cores share: a block's ring.
#include "cuda/device/ring.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/ops/linear/wgmma/plan.hpp"

namespace cf::cuda {

/// A block's stages in shared memory, each with two barriers. A stage holds kLinearWgmmaTileRows rows of operand a, in
/// Bits bits an element, and Rows rows of operand b.
template <int Rows, int Bits = 16>
struct WgmmaRing {
  static constexpr int a_bytes = linear_wgmma_weight_bytes(Bits), stage_bytes = linear_wgmma_stage_bytes(Rows, Bits);
  unsigned char* first;         // at a multiple of 1024 bytes
  std::uint64_t *full, *empty;  // the stages' barriers
  int stages;

  __device__ unsigned char* a(int stage) const { return first + stage * stage_bytes; }
  __device__ unsigned char* b(int stage) const { return a(stage) + a_bytes; }
};

}  // namespace cf::cuda
