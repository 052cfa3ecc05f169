#pragma once
// What the stages of the persistent kernel share: the block's shared memory, its two kinds of working warps, and how they
// tell each other and the other blocks of their work and wait for theirs.
#include "cuda/device/bulk.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/fused/call.hpp"

namespace cf::cuda {

/// The block's shared memory, as DecodeLayout has it.
extern __shared__ __align__(128) char decode_smem[];

/// threadIdx.x, read anew: what follows from it is then not held in registers from one product to the next.
__device__ inline int fresh_thread() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

/// The block, as one kind of its warps sees it.
struct Block {
  const DecodeCall& c;
  int first_thread, threads, barrier;
  unsigned heard = 0;  // a bit a signal: the parity of the phase to wait for

  static constexpr int kProductBarrier = 1, kHelperBarrier = 2;
  static __device__ Block products(const DecodeCall& c) { return {c, 0, kProductThreads, kProductBarrier}; }
  static __device__ Block helpers(const DecodeCall& c) { return {c, kProductThreads, kHelperThreads, kHelperBarrier}; }

  __device__ int thread() const { return fresh_thread() - first_thread; }
  template <class U>
  __device__ U* at(int offset) const {
    return reinterpret_cast<U*>(decode_smem + offset);
  }
  __device__ void sync() const { named_barrier(barrier, threads); }

  /// Says that a wait took too long: everybody leaves.
  __device__ volatile int& stopped() const { return at<int>(c.layout.notice)[0]; }
  /// Says that the products' warps have left.
  __device__ volatile int& abandoned() const { return at<int>(c.layout.notice)[1]; }
  __device__ volatile int& notice() const { return at<int>(c.layout.notice)[2]; }
  /// Of this launch, which no other launch uses: one for each layer, and one more.
  __device__ unsigned& first_tag() const { return at<unsigned>(c.layout.notice)[3]; }

  __device__ std::uint64_t* signal_barrier(Signal s) const {
    return at<std::uint64_t>(c.layout.barriers) + 2 * c.plan.stages + c.plan.cache_stages + int(s);
  }
  /// Each warp of one kind tells, each of the other hears, in turn.
  __device__ void tell(Signal s) const {
    __syncwarp();
    if (thread() % 32 == 0) arrive(signal_barrier(s));
  }
  /// False when the block must leave.
  __device__ bool hear(Signal s) {
    const unsigned bit = 1u << int(s);
    while (!try_wait_barrier(signal_barrier(s), (heard & bit) != 0))
      if (stopped()) return false;
    heard ^= bit;
    return true;
  }

  __device__ int code(int layer, Dependency d) const { return layer * kDependencies + int(d) + 1; }
  __device__ unsigned* counter(int layer, Dependency d) const {
    return c.done + (layer - c.first) * kDependencies + int(d);
  }
  /// Tells all blocks that this one's part of a dependency is written.
  __device__ void publish(int layer, Dependency d) const {
    sync();
    if (thread() != 0) return;
    if (c.delay_seed) dawdle(c.delay_seed + unsigned(code(layer, d)));
    if (!withholds(layer, d)) add_release(counter(layer, d), 1);
  }
  __device__ bool withholds(int layer, Dependency d) const { return c.withheld == code(layer, d); }
  /// Waits for all `parts` of a dependency; false when that took too long, here or in another block: the block must leave.
  __device__ bool await(int layer, Dependency d, int parts) const {
    if (thread() == 0) {
      const unsigned* done = counter(layer, d);
      spin(layer, d, [&] { return load_acquire(done) >= unsigned(parts); });
    }
    sync();
    return stopped() == 0;
  }
  /// Until ready() or for too long, which stops the block.
  template <class Ready>
  __device__ void spin(int layer, Dependency d, Ready ready) const {
    std::uint64_t start = 0;
    for (unsigned spins = 1; !ready(); ++spins) {
      if (spins % 256) continue;
      if (start == 0) start = time_ns();
      if (waited_too_long(c.flags, c.report, start + c.wait_limit_ns, code(layer, d))) {
        stopped() = 1;
        return;
      }
    }
  }

 private:
  /// Up to 16 us, by a hash of the seed and the block.
  static __device__ __noinline__ void dawdle(unsigned seed) {
    const unsigned hash = (seed * 2654435761u ^ (blockIdx.x + 1) * 2246822519u) * 3266489917u;
    __nanosleep(hash >> 18);
  }
  /// Whether to give up, since it is too late or another block has given up.
  static __device__ __noinline__ bool waited_too_long(DecodeFlags* flags, unsigned* report, std::uint64_t until_ns,
                                                      int what) {
    if (load_acquire(&flags->stopped)) return true;
    if (time_ns() <= until_ns) return false;
    if (fetch_add(&flags->stopped, 1) == 0) {
      *report = unsigned(what);
      __threadfence_system();
    }
    return true;
  }
};

__device__ inline void store_tagged(Tagged* to, float value, unsigned tag) {
  store_relaxed(reinterpret_cast<std::uint64_t*>(to), std::uint64_t(tag) << 32 | __float_as_uint(value));
}
/// Two neighbours, the first of which lies at a multiple of 16 bytes.
__device__ inline void load_tagged(const Tagged* from, Tagged (&two)[2]) {
  const ulonglong2 bits = load_relaxed(reinterpret_cast<const std::uint64_t*>(from));
  two[0] = {__uint_as_float(unsigned(bits.x)), unsigned(bits.x >> 32)};
  two[1] = {__uint_as_float(unsigned(bits.y)), unsigned(bits.y >> 32)};
}

/// What other blocks have written during this launch: not from the L1, which may hold what was there before.
template <class U>
__device__ U load_shared_work(const U* p) {
  return __ldcg(p);
}

/// Brings `columns` of each token's activations, `from_row` elements apart, into shared memory.
template <class T>
__device__ void fetch_tokens(const Block& block, const T* from, int from_row, int columns, char* to, int to_row) {
#pragma unroll 1
  for (int token = 0; token < block.c.dims.batch; ++token)
#pragma unroll 4
    for (int i = block.thread() * kVec; i < columns; i += kHelperThreads * kVec)
      copy_async(shared_address(to + token * to_row + i * 2), from + long(token) * from_row + i);
  wait_for_copies();
}

}  // namespace cf::cuda
