#pragma once
// What the stages of the persistent kernel share: the block's shared memory, its two kinds of working warps, and how they
// tell each other and the other blocks of their work and wait for theirs.
#include "cuda/device/bulk.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/fused/call.hpp"

namespace cf::cuda {

/// The block's shared memory, as DecodeLayout has it.
extern __shared__ __align__(128) char decode_smem[];

/// The block, as one kind of its warps sees it.
struct Block {
  const DecodeCall& c;
  int first_thread, threads, barrier;
  unsigned heard = 0;  // a bit a signal: the parity of the phase to wait for

  static constexpr int kProductBarrier = 1, kHelperBarrier = 2;
  /// Before the first part of a head there is none to be taken: a barrier's phase before its first counts as complete.
  static __device__ Block products(const DecodeCall& c) {
    return {c, 0, kProductThreads, kProductBarrier, 1u << int(Signal::part_taken)};
  }
  static __device__ Block helpers(const DecodeCall& c) { return {c, kProductThreads, kHelperThreads, kHelperBarrier}; }

  __device__ int thread() const { return thread_index() - first_thread; }
  template <class U>
  __device__ U* at(int offset) const {
    return reinterpret_cast<U*>(decode_smem + offset);
  }
  __device__ void sync() const { named_barrier(barrier, threads); }
  /// The same; true where no thread has seen that the block must leave: all go on, or none.
  __device__ bool sync_and_go_on() const { return named_barrier_none(barrier, threads, stopped() != 0); }

  /// Says that a wait took too long: everybody leaves.
  __device__ volatile int& stopped() const { return at<int>(c.layout.notice)[0]; }
  /// Says that the products' warps have left.
  __device__ volatile int& abandoned() const { return at<int>(c.layout.notice)[1]; }
  /// Of this launch, which no other launch uses: one for each layer, and one more.
  __device__ unsigned& first_tag() const { return at<unsigned>(c.layout.notice)[2]; }
  /// What a layer reads and makes is stored with; the hidden state that it makes with the next layer's.
  __device__ unsigned tag(int layer) const { return first_tag() + unsigned(layer); }
  /// The tag to store with: one that nobody waits for where a test withholds the dependency.
  __device__ unsigned tag(int layer, Dependency d) const {
    return tag(d == Dependency::hidden ? layer + 1 : layer) ^ (c.withheld == code(layer, d) ? 0x8000u : 0u);
  }

  __device__ std::uint64_t* signal_barrier(Signal s) const {
    return at<std::uint64_t>(c.layout.barriers) + 2 * c.plan.stages + int(s);
  }
  /// Each warp of one kind tells, each of the other hears, in turn.
  __device__ void tell(Signal s) const {
    __syncwarp();
    if (thread() % 32 == 0) arrive(signal_barrier(s));
  }
  /// False when the block must leave; what was told before that is heard by all.
  __device__ bool hear(Signal s) {
    const unsigned bit = 1u << int(s);
    const bool parity = (heard & bit) != 0;
    while (!try_wait_barrier(signal_barrier(s), parity))
      if (stopped()) {
        if (try_wait_barrier(signal_barrier(s), parity)) break;
        return false;
      }
    heard ^= bit;
    return true;
  }

  /// The same for what comes in any case.
  __device__ void await(Signal s) {
    const unsigned bit = 1u << int(s);
    while (!try_wait_barrier(signal_barrier(s), (heard & bit) != 0)) {
    }
    heard ^= bit;
  }

  __device__ int code(int layer, Dependency d) const { return layer * kDependencies + int(d) + 1; }
  /// For tests: one thread holds the others up at their next barrier.
  __device__ void maybe_dawdle(int step) const {
    if (c.delay_seed && thread() == 0) dawdle(c.delay_seed + unsigned(step));
  }
  /// Until ready() or for too long, which stops the block.
  template <class Ready>
  __device__ void spin(int layer, Dependency d, Ready ready) const {
    std::uint64_t start = 0;
    for (unsigned spins = 1; !ready(); ++spins) {
      if (spins % 256) continue;
      if (start == 0) start = time_ns();
      // What is made later is given up later: the report names what was missing first.
      const std::uint64_t limit_ns = c.wait_limit_ns + unsigned(d) * c.wait_limit_ns / 4;
      if (waited_too_long(c.flags, c.report, start + limit_ns, code(layer, d))) {
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
    // A launch after that may lack what this one has not made: what was reported first stays.
    if (volatile unsigned* const first = report; fetch_add(&flags->stopped, 1) == 0 && *first == 0) {
      *first = unsigned(what);
      __threadfence_system();
    }
    return true;
  }
};

__device__ inline std::uint64_t bits_of(float value, unsigned tag) {
  return std::uint64_t(tag) << 32 | __float_as_uint(value);
}
__device__ inline Tagged tagged(std::uint64_t bits) { return {__uint_as_float(unsigned(bits)), unsigned(bits >> 32)}; }
__device__ inline void store_tagged(Tagged* to, float value, unsigned tag) {
  store_relaxed(reinterpret_cast<std::uint64_t*>(to), bits_of(value, tag));
}
/// Two neighbours, the first of which lies at a multiple of 16 bytes.
__device__ inline void load_tagged(const Tagged* from, Tagged (&two)[2]) {
  const ulonglong2 bits = load_relaxed(reinterpret_cast<const std::uint64_t*>(from));
  two[0] = tagged(bits.x), two[1] = tagged(bits.y);
}
/// The same in device memory or in the cluster's shared memory.
__device__ inline void store_tagged_anywhere(Tagged* to, float value, unsigned tag) {
  store_relaxed_anywhere(reinterpret_cast<std::uint64_t*>(to), bits_of(value, tag));
}
__device__ inline void load_tagged_anywhere(const Tagged* from, Tagged (&two)[2]) {
  const ulonglong2 bits = load_relaxed_anywhere(reinterpret_cast<const std::uint64_t*>(from));
  two[0] = tagged(bits.x), two[1] = tagged(bits.y);
}

template <class T>
__device__ void store_tagged(TaggedElement* to, T value, unsigned tag) {
  store_relaxed(to, std::uint32_t(value.bits) | tag << 16);
}
__device__ inline bool has_tag(TaggedElement e, unsigned tag) { return e >> 16 == (tag & 0xffff); }
__device__ inline bool have_tag(const uint4& e, unsigned tag) {
  const unsigned t = tag << 16;
  return (((e.x ^ t) | (e.y ^ t)) | ((e.z ^ t) | (e.w ^ t))) < 0x10000;
}

/// Loads pieces 0 to AtOnce - 1 until load(u) and then here(u) say that they are there or none of this thread's: those that
/// are missing again and again, all of them at once. False when that took too long.
template <int AtOnce, class Load, class Here>
__device__ bool await_pieces(const Block& block, int layer, Dependency d, Load load, Here here) {
  unsigned missing = (1u << AtOnce) - 1;
  block.spin(layer, d, [&] {
#pragma unroll
    for (int u = 0; u < AtOnce; ++u)
      if (missing >> u & 1) load(u);
#pragma unroll
    for (int u = 0; u < AtOnce; ++u)
      if (missing >> u & 1 && here(u)) missing &= ~(1u << u);
    return missing == 0;
  });
  return missing == 0;
}

/// Waits for `columns` elements and brings them into shared memory, without their tags. Columns are a multiple of eight.
/// False when that took too long.
__device__ inline bool fetch_token(const Block& block, int layer, Dependency d, const TaggedElement* from, int columns,
                                   char* to) {
  constexpr int at_once = 7;  // pieces of eight elements whose loads are in flight together
  const unsigned tag = block.tag(layer);
  const int thread = block.thread(), step = block.threads * kVec, sample = columns / 32 * (thread % 32);
  // While little is there, each lane looks at one element, all over the row.
  block.spin(layer, d, [&] { return has_tag(load_relaxed(from + sample), tag); });
  __syncwarp();
#pragma unroll 1
  for (int begin = thread * kVec; begin < columns; begin += at_once * step) {
    uint4 low[at_once] = {}, high[at_once] = {};
    const auto load = [&](int u) {
      if (begin + u * step >= columns) return;
      low[u] = load_relaxed_quad(from + begin + u * step);
      high[u] = load_relaxed_quad(from + begin + u * step + 4);
    };
    const auto here = [&](int u) {
      return begin + u * step >= columns || (have_tag(low[u], tag) && have_tag(high[u], tag));
    };
    if (!await_pieces<at_once>(block, layer, d, load, here)) break;
    const auto pair = [](unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); };
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      if (const int i = begin + u * step; i < columns)
        *reinterpret_cast<uint4*>(to + i * 2) = {pair(low[u].x, low[u].y), pair(low[u].z, low[u].w),
                                                 pair(high[u].x, high[u].y), pair(high[u].z, high[u].w)};
  }
  // A warp's lanes go on together, or none does.
  return __all_sync(~0u, !block.stopped());
}

/// Says by a word of the block's own that what its threads of this kind have stored of a layer is there.
__device__ inline void say_done(const Block& block, unsigned* word, unsigned tag) {
  block.sync();
  if (block.thread() != 0) return;
  __threadfence();
  store_relaxed(word, tag);
}
/// Waits until all words say so; false when that took too long. What was stored before is visible then.
__device__ inline bool await_done(const Block& block, int layer, Dependency d, const unsigned* words, int count) {
  const unsigned tag = block.tag(layer);
#pragma unroll 1
  for (int i = block.thread(); i < count; i += block.threads)
    block.spin(layer, d, [&] { return load_relaxed(words + i) == tag; });
  __threadfence();
  return block.sync_and_go_on();
}
/// The helpers' warps bring so many bytes of each token, `from_row` apart, into shared memory.
__device__ inline void copy_tokens(Block& block, const char* from, long from_row, int bytes, char* to, int to_row) {
  const int warp = block.thread() / 32, tokens = block.c.dims.batch;
  if (block.thread() % 32 == 0) {
    std::uint64_t* const copied = block.signal_barrier(Signal::copied);
    let_copies_see();
    arrive_expecting(copied, (max(tokens - warp, 0) + kHelperWarps - 1) / kHelperWarps * bytes);
    for (int token = warp; token < tokens; token += kHelperWarps)
      copy_bulk(to + token * to_row, from + token * from_row, bytes, copied);
  }
  block.await(Signal::copied);
}

}  // namespace cf::cuda
