#pragma once
// PTX, one line a wrapper, for kernels whose blocks work together: barriers that a warp may leave, accesses to device
// memory that other blocks see whole, counters that order others.
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

/// A counter; what was written before an addition to it that the value holds is visible to the thread.
__device__ inline unsigned load_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
/// Adds to a counter and gives the value before; orders as load_acquire(), and what the thread wrote before for those who
/// read the sum.
__device__ inline unsigned fetch_add(unsigned* counter, unsigned n) {
  unsigned value;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(value) : "l"(counter), "r"(n) : "memory");
  return value;
}

/// What the thread knows of device memory the copy engine, when it asks it later, knows too.
__device__ inline void let_copies_see() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Brings the line of an address into the L2.
__device__ inline void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/// Four or eight bytes in one access, in no order with others.
__device__ inline void store_relaxed(std::uint32_t* to, std::uint32_t bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
__device__ inline void store_relaxed(std::uint64_t* to, std::uint64_t bits) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
__device__ inline std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t bits;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return bits;
}
/// Four times four bytes, in no order with each other either; twice eight.
__device__ inline uint4 load_relaxed_quad(const std::uint32_t* from) {
  uint4 bits;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from)
               : "memory");
  return bits;
}
__device__ inline ulonglong2 load_relaxed(const std::uint64_t* from) {
  ulonglong2 bits;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(bits.x), "=l"(bits.y) : "l"(from) : "memory");
  return bits;
}
/// The same at any address, such as one in the shared memory of another block of the cluster.
__device__ inline void store_relaxed_anywhere(std::uint64_t* to, std::uint64_t bits) {
  asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
__device__ inline ulonglong2 load_relaxed_anywhere(const std::uint64_t* from) {
  ulonglong2 bits;
  asm volatile("ld.relaxed.gpu.v2.u64 {%0, %1}, [%2];" : "=l"(bits.x), "=l"(bits.y) : "l"(from) : "memory");
  return bits;
}

/// A barrier among some of a block's warps. 0 is __syncthreads().
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same; true in all of them where `yes` is in none.
__device__ inline bool named_barrier_none(int id, int threads, bool yes) {
  std::uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.or.aligned.pred any, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(std::uint32_t(yes)), "r"(id), "r"(threads)
      : "memory");
  return any == 0;
}

__device__ inline std::uint64_t time_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace cf::cuda
