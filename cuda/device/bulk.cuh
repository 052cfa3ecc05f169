#pragma once
// PTX, one line a wrapper, for kernels whose blocks work together: barriers that a warp may leave, copies that no register
// waits for, flags in device memory.
#include <cstdint>

#include "cuda/device/async.cuh"

namespace cf::cuda {

/// Arrives at a barrier of async.cuh.
__device__ inline void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Whether the phase of this parity is complete; waits a while for it.
__device__ inline bool try_wait_barrier(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

/// Brings bytes into the L2, under copy_bulk()'s conditions.
__device__ inline void prefetch_bulk(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/// Copies 16 bytes from device to shared memory, past the L1. The thread has them after wait_for_copies().
__device__ inline void copy_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Adds to a counter that other blocks read with load_acquire(): what this thread and, before a block's barrier, its
/// block have written is visible to whoever sees the sum.
__device__ inline void add_release(unsigned* counter, unsigned n) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}
__device__ inline unsigned load_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
/// The same with both, and the value before.
__device__ inline unsigned fetch_add(unsigned* counter, unsigned n) {
  unsigned value;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(value) : "l"(counter), "r"(n) : "memory");
  return value;
}

/// Eight bytes in one access, in no order with others.
__device__ inline void store_relaxed(std::uint64_t* to, std::uint64_t bits) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
/// Twice eight bytes, in no order with each other either.
__device__ inline ulonglong2 load_relaxed(const std::uint64_t* from) {
  ulonglong2 bits;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(bits.x), "=l"(bits.y) : "l"(from) : "memory");
  return bits;
}

/// A barrier among some of a block's warps. 0 is __syncthreads().
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline std::uint64_t time_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace cf::cuda
