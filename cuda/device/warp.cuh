#pragma once
// What a warp's lanes do together.
#include <cstdint>

namespace cf::cuda {

/// The sum of x over aligned groups of `Width` lanes. Each lane of a group gets the same bits.
template <int Width = 32>
__device__ float warp_sum(float x) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// The inclusive prefix sum of x over the lanes of a warp. `lane` is the number of the calling lane.
__device__ inline std::uint64_t warp_scan(std::uint64_t x, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::uint64_t other = __shfl_up_sync(~0u, x, unsigned(offset));
    if (lane >= offset) x += other;
  }
  return x;
}

/// The largest x of a warp, in all lanes.
__device__ inline std::uint64_t warp_max(std::uint64_t x) {
  const auto high = std::uint32_t(x >> 32), highest = __reduce_max_sync(~0u, high);
  const std::uint32_t low = __reduce_max_sync(~0u, high == highest ? std::uint32_t(x) : 0);
  return std::uint64_t(highest) << 32 | low;
}

/// The value of lane (lane ^ bits).
__device__ inline uint4 exchange(const uint4& v, int bits) {
  return {__shfl_xor_sync(~0u, v.x, bits), __shfl_xor_sync(~0u, v.y, bits), __shfl_xor_sync(~0u, v.z, bits),
          __shfl_xor_sync(~0u, v.w, bits)};
}

/// True in one lane of a warp, all of whose lanes call. The compiler knows that it is one lane, so it issues bulk
/// copies without a loop over lanes.
__device__ inline bool elected() {
  std::uint32_t yes;
  asm volatile(
      "{\n"
      ".reg .pred yes;\n"
      "elect.sync _|yes, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, yes;\n"
      "}"
      : "=r"(yes));
  return yes;
}

/// Lane 0's value in all lanes. The compiler then knows that all lanes have the same value.
__device__ inline int same_in_warp(int v) { return __shfl_sync(~0u, v, 0); }

/// threadIdx.x, read again at each call: a value that is kept during a long loop costs a register.
__device__ inline int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  __builtin_assume(i >= 0 && i < 1024);  // the compiler then divides by powers of two with a shift
  return i;
}

/// Makes the compiler forget what it knows of x. After this call it computes again what depends on x, instead of
/// holding it in registers.
__device__ inline void make_anew(int& x) { asm volatile("" : "+r"(x)); }

}  // namespace cf::cuda
