#pragma once
// Order between kernels, between a block's warps and between blocks. PTX, one instruction a function.
#include <cstddef>
#include <cstdint>

namespace cf::cuda {

// Kernels that overlap (programmatic dependent launch).

/// Waits until the kernels before this one on the stream are complete and their writes are visible. Before this call a
/// kernel may read only what no kernel of the stream writes: weights, and what LaunchMode::after_waiting names. In a
/// launch that may not overlap this call does nothing.
__device__ inline void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Allows the next kernel's blocks to start where this kernel's blocks leave room.
__device__ inline void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// Named barriers, among some of a block's warps. Barrier 0 is that of __syncthreads().

/// Waits until `threads` threads have arrived at barrier `id`.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at barrier `id` without waiting. `threads` counts these and those that wait in named_barrier().
__device__ inline void arrive_at_named_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// named_barrier() with a vote: returns, in all threads, whether `yes` is false in every thread.
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

// Order of accesses to device memory.

/// Loads a counter. Where the value holds another thread's fetch_add(), what that thread wrote before is visible.
__device__ inline unsigned load_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

/// Adds n to a counter and returns the value before. What this thread wrote before becomes visible to threads that read
/// the sum, and it acquires as load_acquire() does.
__device__ inline unsigned fetch_add(unsigned* counter, unsigned n) {
  unsigned value;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(value) : "l"(counter), "r"(n) : "memory");
  return value;
}

/// Orders this thread's plain accesses to device memory before the bulk copies that it starts afterwards: the copies
/// see what the thread sees.
__device__ inline void let_copies_see() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Relaxed accesses. Every thread of the device sees all bytes of such an access or none. Several accesses have no
// order.

/// Stores four bytes.
__device__ inline void store_relaxed(std::uint32_t* to, std::uint32_t bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

/// Stores eight bytes.
__device__ inline void store_relaxed(std::uint64_t* to, std::uint64_t bits) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}

/// Loads four bytes.
__device__ inline std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t bits;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return bits;
}

/// Loads two words of four bytes. Each word is whole; the words have no order with each other.
__device__ inline uint2 load_relaxed_pair(const std::uint32_t* from) {
  uint2 bits;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(from) : "memory");
  return bits;
}

/// Loads four words of four bytes. Each word is whole; the words have no order with each other.
__device__ inline uint4 load_relaxed_quad(const std::uint32_t* from) {
  uint4 bits;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from)
               : "memory");
  return bits;
}

/// Loads two words of eight bytes. Each word is whole; the words have no order with each other.
__device__ inline ulonglong2 load_relaxed(const std::uint64_t* from) {
  ulonglong2 bits;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(bits.x), "=l"(bits.y) : "l"(from) : "memory");
  return bits;
}

/// Store eight or four bytes to the host's memory. The host sees all of them or none.
__device__ inline void store_for_host(std::uint64_t* to, std::uint64_t bits) {
  asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
__device__ inline void store_for_host(std::uint32_t* to, std::uint32_t bits) {
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
/// Loads four bytes of the host's memory.
__device__ inline std::uint32_t load_from_host(const std::uint32_t* from) {
  std::uint32_t bits;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return bits;
}

// Accesses that other GPUs see.

/// Store and load 16 bytes. Each word of eight bytes is whole; several words have no order with each other.
__device__ inline void store_words_to_peer(std::byte* to, const uint4& words) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ inline uint4 load_words_of_peer(const std::byte* from) {
  uint4 words;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}
/// Stores a flag. Who acquires it sees what this thread has seen or stored before.
__device__ inline void release_to_peer(std::uint32_t* flag, std::uint32_t epoch) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}
__device__ inline std::uint32_t acquire_from_peer(const std::uint32_t* flag) {
  std::uint32_t epoch;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(epoch) : "l"(flag) : "memory");
  return epoch;
}

// Time.

/// The device's clock in nanoseconds, for limits on waits.
__device__ inline std::uint64_t time_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace cf::cuda
