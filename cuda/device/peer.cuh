#pragma once
// Words that threads of other GPUs store and load, whole. PTX, one instruction a function.
#include <cstdint>

namespace cf::cuda {

/// Store eight or four bytes. Every thread of every GPU sees all of them or none.
__device__ inline void store_to_peer(std::uint64_t* to, std::uint64_t bits) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
__device__ inline void store_to_peer(std::uint32_t* to, std::uint32_t bits) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
/// Loads eight bytes.
__device__ inline std::uint64_t load_of_peer(const std::uint64_t* from) {
  std::uint64_t bits;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
  return bits;
}
/// Loads four words of four bytes. Each word is whole; one may be older than another.
__device__ inline uint4 load_quad_of_peer(const std::uint32_t* from) {
  uint4 bits;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from)
               : "memory");
  return bits;
}

}  // namespace cf::cuda
