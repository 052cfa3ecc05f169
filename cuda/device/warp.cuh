#pragma once

namespace cf::cuda {

/// The sum over aligned groups of `Width` lanes, the same bits in each of them.
template <int Width = 32>
__device__ float warp_sum(float x) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// What the lane has whose number differs in these bits.
__device__ inline uint4 exchange(const uint4& v, int bits) {
  return {__shfl_xor_sync(~0u, v.x, bits), __shfl_xor_sync(~0u, v.y, bits), __shfl_xor_sync(~0u, v.z, bits),
          __shfl_xor_sync(~0u, v.w, bits)};
}

/// threadIdx.x, read anew: held over a long loop it would cost a register.
__device__ inline int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
/// The same for a variable: what follows from it before is not held for after.
__device__ inline void make_anew(int& x) { asm volatile("" : "+r"(x)); }

/// The same in all lanes, which the compiler then knows.
__device__ inline int same_in_warp(int v) { return __shfl_sync(~0u, v, 0); }

}  // namespace cf::cuda
