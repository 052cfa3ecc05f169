#pragma once
// mbarrier: barriers in shared memory that threads arrive at and that count the bytes of copies. PTX, one instruction a
// function. A barrier's phases complete one after the other; the parity of a phase is 0, 1, 0, ... A barrier is named
// by a pointer or by its 32-bit address.
#include <cstdint>

#include "cuda/device/address.cuh"

namespace cf::cuda {

/// Makes a barrier. A phase of it completes with the phase's `arrivals`-th arrival.
__device__ inline void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void init_barrier(std::uint64_t* barrier, int arrivals) {
  init_barrier(shared_address(barrier), arrivals);
}

/// Makes the barriers that this thread initialised visible to the copy engine and to the cluster's other blocks.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives at the current phase.
__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive(std::uint64_t* barrier) { arrive(shared_address(barrier)); }

/// Arrives at the current phase of a barrier of any block of the cluster: `barrier` is from shared_address_in(). Says
/// that the thread is done with what the tensor cores read, and orders none of its own writes for another block: a
/// release for the cluster would wait for them in device memory.
__device__ inline void arrive_in_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives at the current phase, which completes only after copies have also written `bytes` bytes.
__device__ inline void arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void arrive_expecting(std::uint64_t* barrier, int bytes) {
  arrive_expecting(shared_address(barrier), bytes);
}

/// Waits until the phase of this parity is complete. What its threads and copies wrote is then visible.
__device__ inline void wait_barrier(std::uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// wait_barrier() for a barrier that other blocks of the cluster write to.
__device__ inline void wait_cluster_barrier(std::uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// Whether the phase of this parity is complete. Does not wait.
__device__ inline bool test_barrier(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

/// Waits for the phase of this parity, but only for some microseconds. True where it is complete.
__device__ inline bool try_wait_barrier(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ inline bool try_wait_barrier(std::uint64_t* barrier, std::uint32_t parity) {
  return try_wait_barrier(shared_address(barrier), parity);
}

}  // namespace cf::cuda
