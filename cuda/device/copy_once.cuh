#pragma once
// Copies of what a launch reads once, such as weights: the L2 gives their lines up before others. PTX, one instruction
// a function.
#include <cstdint>

#include "cuda/device/address.cuh"

namespace cf::cuda {

/// Tells copies that the L2 may evict what they have read first.
__device__ inline std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// copy_tensor_tile() with a policy for the L2.
__device__ inline void copy_tensor_tile(void* to, const void* map, int column, int row, int matrix,
                                        std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

}  // namespace cf::cuda
