#pragma once
// Shared memory's addresses as PTX takes them. PTX, one instruction a function.
#include <cstdint>

namespace cf::cuda {

/// The 32-bit address of a byte in the block's shared memory.
__device__ inline std::uint32_t shared_address(const void* p) { return std::uint32_t(__cvta_generic_to_shared(p)); }

/// The pointer to a byte of the block's shared memory.
__device__ inline const char* shared_pointer(std::uint32_t address) {
  return static_cast<const char*>(__cvta_shared_to_generic(address));
}

/// The address of the same byte in the shared memory of the cluster's block `rank`.
__device__ inline std::uint32_t shared_address_in(unsigned rank, const void* p) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}

}  // namespace cf::cuda
