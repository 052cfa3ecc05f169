#pragma once
// A block of the persistent kernel as one kind of its warps sees it: its shared memory, the signals between its warps,
// and the waits for other blocks.
#include "core/cache_view.hpp"
#include "cuda/device/address.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/persistent/arguments.hpp"
#include "cuda/persistent/exchange.cuh"

namespace cf::cuda {

/// The block's dynamic shared memory, laid out by PersistentLayout.
extern __shared__ __align__(128) char block_smem[];

/// A phase of the launch's table, loaded in one access.
__device__ inline PhaseSpec load_phase(const PersistentArguments& c, int at) {
  unsigned bits = *reinterpret_cast<const unsigned*>(&c.phases[std::size_t(at)]);
  asm volatile("" : "+r"(bits));
  return __builtin_bit_cast(PhaseSpec, bits);
}

struct Block {
  const PersistentArguments& c;
  int first_thread, threads, barrier;
  unsigned parities = 0;  // a bit for each signal: the parity of its barrier's next phase
  int token = 0;          // of the launch

  static constexpr int kConsumerBarrier = 1, kAuxiliaryBarrier = 2;
  /// The consumer warps wait for partials_taken before they store a key split's partial results. Their first wait must
  /// return at once: it is for the phase before the barrier's first, which counts as complete.
  static __device__ Block consumers(const PersistentArguments& c) {
    return {c, 0, kConsumerThreads, kConsumerBarrier, 1u << int(Signal::partials_taken)};
  }
  static __device__ Block auxiliaries(const PersistentArguments& c) {
    return {c, kConsumerThreads, kAuxiliaryThreads, kAuxiliaryBarrier};
  }

  __device__ int thread() const { return thread_index() - first_thread; }
  template <class U>
  __device__ U* at(int offset) const {
    return reinterpret_cast<U*>(block_smem + offset);
  }
  /// A barrier of all warps of this kind.
  __device__ void sync() const { named_barrier(barrier, threads); }
  /// The same barrier; true where no thread had seen the notice to stop. All threads get the same answer.
  __device__ bool sync_unless_stopped() const { return named_barrier_none(barrier, threads, stopped() != 0); }

  __device__ BlockNotice& notice() const { return *at<BlockNotice>(c.layout.notice); }
  __device__ volatile int& stopped() const { return notice().stopped; }
  __device__ volatile int& consumer_warps() const { return notice().consumer_warps; }
  __device__ volatile int& tokens_begun() const { return notice().tokens_begun; }
  __device__ volatile int& asked_to_end() const { return notice().asked_to_end; }
  __device__ volatile int& asked_all_to_end() const { return notice().asked_all_to_end; }

  /// The layer's pointers. The auxiliary warps copy the next layer's while the consumer warps are in this layer.
  __device__ LayerPointers& pointers(int layer) const { return pointers_of(layer, token); }
  __device__ LayerPointers& pointers_of(int layer, int of_token) const {
    return at<LayerPointers>(c.layout.layer_pointers)[(of_token * c.layers + layer) & 1];
  }
  /// How the layer's weights are stored.
  __device__ const LayerKind& kind(int layer) const { return c.kinds[pointers(layer).kind]; }
  /// The column of each input of a packed matrix; null where column k is input k.
  __device__ const int* input_columns(const LayerKind& kind, Weight w, int layer) const {
    const std::int64_t at = kind.packed[int(w)].input_columns;
    return at ? reinterpret_cast<const int*>(pointers(layer).weights.matrix[int(w)] + at) : nullptr;
  }
  /// Copies a layer's pointers from device memory to shared memory. Of the threads that call, each of the first
  /// kLayerPointers copies one pointer.
  __device__ void bring_pointers(int layer, int of_token, int thread) const {
    if (thread >= kLayerPointers) return;
    reinterpret_cast<std::uint64_t*>(&pointers_of(layer, of_token))[thread] =
        reinterpret_cast<const std::uint64_t*>(c.layer_pointers + layer)[thread];
  }

  /// The epoch of everything that a layer reads. What the layer makes has the same epoch, but for the hidden state,
  /// which has the next layer's. A token has an epoch for each layer and one more; no other token uses any of them.
  __device__ unsigned epoch(int layer) const { return c.exchange.epoch(notice().first_epoch, token, layer); }
  /// The epoch to store with. Where a test withholds the dependency, it is an epoch that nobody waits for, in its
  /// lowest eight bits too.
  __device__ unsigned epoch(int layer, Dependency d) const {
    return epoch(d == Dependency::hidden ? layer + 1 : layer) ^
           (c.withheld == dependency_code(layer, d) ? 0x8080u : 0u);
  }

  /// Of a launch on ranks: the epoch of the residual stream's words that a layer reads; the one to store with, as
  /// epoch() has it; and where the words that a layer makes lie.
  __device__ RankNotice& rank_notice() const { return *at<RankNotice>(c.layout.notice + int(sizeof(BlockNotice))); }
  __device__ unsigned rank_epoch(int layer) const { return rank_notice().epoch(layer); }
  __device__ unsigned rank_epoch(int layer, Dependency d) const {
    return rank_epoch(d == Dependency::hidden ? layer + 1 : layer) ^
           (c.withheld == dependency_code(layer, d) ? 0x8080u : 0u);
  }
  __device__ int rank_buffer(Dependency d, int made_in) const { return rank_notice().buffer(d, made_in); }

  /// Ends sequence s, which is idle from then on: nothing is appended for it, and it attends to no key. Its row of the
  /// batch is NaN.
  __device__ void end_sequence(int s) const { at<int>(c.layout.lengths)[s] = kIdleLength; }
  __device__ bool all_sequences_ended() const {
    bool all = true;
    for (int s = 0; s < c.dims.batch; ++s) all = all && at<int>(c.layout.lengths)[s] == kIdleLength;
    return all;
  }

  __device__ std::uint64_t* signal_barrier(Signal s) const {
    return at<std::uint64_t>(c.layout.barriers) + 2 * kMaxRingStages + int(s);
  }
  /// Every warp of the kind that signals calls this; every warp of the kind that is told calls wait().
  __device__ void signal(Signal s) const {
    __syncwarp();
    if (thread() % 32 == 0) arrive(signal_barrier(s));
  }
  /// False where the block must leave. A signal that was given before the stop is received by all warps, so that all of
  /// them go on to the same named barrier.
  __device__ bool wait(Signal s) {
    const unsigned bit = 1u << int(s);
    const bool parity = (parities & bit) != 0;
    while (!try_wait_barrier(signal_barrier(s), parity))
      if (stopped()) {
        if (try_wait_barrier(signal_barrier(s), parity)) break;
        return false;
      }
    parities ^= bit;
    return true;
  }
  /// Waits for a signal of the copy engine, which comes even after a stop.
  __device__ void wait_for_copy(Signal s) {
    const unsigned bit = 1u << int(s);
    while (!try_wait_barrier(signal_barrier(s), (parities & bit) != 0)) {
    }
    parities ^= bit;
  }

  /// For tests: one thread delays its warp, and the others at their next barrier.
  __device__ void maybe_delay(int step) const {
    if (c.delay_seed) [[unlikely]]
      delay(c.delay_seed + unsigned(step), thread(), threads);
  }
  /// Where nobody is waited for but the blocks of this rank.
  struct OwnRank {
    __device__ constexpr int operator()(int = 0) const { return -1; }
  };
  /// Polls until ready() is true, and stops the block where that takes too long. The report then names the rank whose
  /// number late() returns, if that is one.
  template <class Ready, class Late = OwnRank>
  __device__ void poll(int layer, Dependency d, Ready ready, Late late = {}) const {
    std::uint64_t start = 0;
    for (unsigned polls = 1; !ready(); ++polls) {
      if (polls % 256) continue;
      if (start == 0) start = time_ns();
      // A dependency that comes later in a layer has a longer limit, so that the report names the first one missing.
      const std::uint64_t limit_ns = c.wait_limit_ns + unsigned(d) * c.wait_limit_ns / 4;
      if (waited_too_long(c.exchange.grid_state, c.report, start + limit_ns,
                          report_code(dependency_code(layer, d), late()))) {
        stopped() = 1;
        return;
      }
    }
  }

 private:
  /// One of `threads` threads waits up to 16 us. A hash of the seed and the block chooses the thread and the time.
  static __device__ __noinline__ void delay(unsigned seed, int thread, int threads) {
    const unsigned hash = (seed * 2654435761u ^ (blockIdx.x + 1) * 2246822519u) * 3266489917u;
    if (thread == int((hash >> 4) % unsigned(threads))) __nanosleep(hash >> 18);
  }
  /// True where it is too late, or where another block has stopped the grid. The first block to stop it reports why.
  static __device__ __noinline__ bool waited_too_long(GridState* grid, unsigned* report, std::uint64_t until_ns,
                                                      int code) {
    if (load_acquire(&grid->stopped)) return true;
    if (time_ns() <= until_ns) return false;
    // The first report stays: a later launch may only lack what a stopped launch has not made.
    if (volatile unsigned* const first = report; fetch_add(&grid->stopped, 1) == 0 && *first == 0) {
      *first = unsigned(code);
      __threadfence_system();
    }
    return true;
  }
};

/// Stores cos and sin of each sequence's new token. A position outside the RoPE table makes them NaN.
template <class PositionOf>
__device__ void store_angles(const Block& block, int thread, int threads, PositionOf position_of) {
  const PersistentArguments& c = block.c;
  const int half = c.dims.half_rotary;
  for (int i = thread; i < c.dims.batch * 2 * half; i += threads) {
    const int at = i % (2 * half), position = position_of(i / (2 * half));
    const float* const table = at < half ? c.cos : c.sin;
    block.at<float>(c.layout.angles)[i] =
        position >= 0 && position < c.table_rows ? table[long(position) * half + at % half] : NAN;
  }
}

/// Stores the page of a sequence's newest entry; `length` counts the entries with that one. Nothing reads the page of a
/// sequence that has no entry, or more than there is room for.
__device__ inline void store_newest_page(const Block& block, int sequence, int length) {
  const PersistentPages& pages = block.c.pages;
  int page = sequence;
  if (pages.table && 1 <= length && length <= block.c.capacity)
    page = pages.table[sequence * pages.of_sequence + pages.by_entries.quotient(length - 1)];
  block.at<int>(block.c.layout.newest_pages)[sequence] = page;
}

/// Where a slice of mlp.act lies in shared memory, and the signals that it is there and that it is used. Where there
/// are two buffers, the next slice may be there before this one is used.
struct ActBuffer {
  int offset;
  Signal here, used;

  __device__ ActBuffer(const PersistentArguments& c, int slice)
      : offset(is_second(c, slice) ? c.layout.attn_x : c.layout.mlp_x),
        here(is_second(c, slice) ? Signal::act_here_too : Signal::act_here),
        used(is_second(c, slice) ? Signal::act_used_too : Signal::act_used) {}

 private:
  static __device__ bool is_second(const PersistentArguments& c, int slice) { return c.two_act_buffers && slice % 2; }
};

/// Loads a thread's pieces 0 to AtOnce - 1. load(u) issues the loads of piece u; here(u) is true where the piece is
/// complete or is not this thread's. Loads of all missing pieces are in flight together, and repeated until none is
/// missing. False where that took too long: late(u) is the rank that has not made piece u.
template <int AtOnce, class Load, class Here, class Late = Block::OwnRank>
__device__ bool await_pieces(const Block& block, int layer, Dependency d, Load load, Here here, Late late = {}) {
  unsigned missing = (1u << AtOnce) - 1;
  const auto ready = [&] {
#pragma unroll
    for (int u = 0; u < AtOnce; ++u)
      if (missing >> u & 1) load(u);
#pragma unroll
    for (int u = 0; u < AtOnce; ++u)
      if (missing >> u & 1 && here(u)) missing &= ~(1u << u);
    return missing == 0;
  };
  block.poll(layer, d, ready, [&] { return late(__ffs(int(missing)) - 1); });
  return missing == 0;
}

/// A row with more elements than its bound is sampled before it is loaded whole: while most elements are missing, loads
/// of a long row would delay the weights. kUnsampledHidden is the bound for rows of the residual stream,
/// kUnsampledColumns for all other rows.
inline constexpr int kUnsampledHidden = 4096, kUnsampledColumns = 2048;
/// Lanes of a warp that poll a sample, one element each. Polls by all 32 lanes would delay the weights.
inline constexpr int kSampleLanes = 4;

/// Waits for all elements of mlp.act, or of the context, of one token. Stores them in shared memory without their
/// epochs. False where that took too long, in all lanes of a warp alike.
__device__ inline bool fetch_token(const Block& block, int layer, bool is_act) {
  const PersistentArguments& c = block.c;
  const Dependency d = is_act ? Dependency::mlp_act : Dependency::context;
  const ElementWord* const from = is_act ? c.exchange.mlp_act : c.exchange.context;
  const int columns = is_act ? c.dims.intermediate : c.dims.attention;  // a multiple of eight
  char* const to = block.at<char>(is_act ? c.layout.mlp_x : c.layout.attn_x);
  constexpr int at_once = 7;  // pieces of eight elements whose loads are in flight together
  const unsigned epoch = block.epoch(layer);
  const int thread = block.thread(), step = block.threads * kVec, lane = thread % 32;
  if (columns > kUnsampledColumns && lane < kSampleLanes) {
    // The warps' samples lie between each other.
    const int sample = columns / (kSampleLanes * kConsumerWarps) * (lane * kConsumerWarps + thread / 32);
    block.poll(layer, d, [&] { return has_epoch(load_relaxed(from + sample), epoch); });
  }
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
      return begin + u * step >= columns || (have_epoch(low[u], epoch) && have_epoch(high[u], epoch));
    };
    if (!await_pieces<at_once>(block, layer, d, load, here)) break;
    const auto pair = [](unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); };
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      if (const int i = begin + u * step; i < columns)
        *reinterpret_cast<uint4*>(to + i * 2) = {pair(low[u].x, low[u].y), pair(low[u].z, low[u].w),
                                                 pair(high[u].x, high[u].y), pair(high[u].z, high[u].w)};
  }
  return __all_sync(~0u, !block.stopped());
}

/// Stores `count` words, `step` apart, that tell other blocks that what this block's threads of this kind have stored
/// before is complete.
__device__ inline void publish_done(const Block& block, unsigned* words, unsigned epoch, int count = 1, int step = 1) {
  block.sync();
  if (block.thread() != 0) return;
  __threadfence();
  for (int i = 0; i < count; ++i) store_relaxed(words + i * step, epoch);
}
/// Waits until all words have the layer's epoch; what was stored before them is visible then. False where that took too
/// long.
__device__ inline bool await_done(const Block& block, int layer, Dependency d, const unsigned* words, int count) {
  const unsigned epoch = block.epoch(layer);
#pragma unroll 1
  for (int i = block.thread(); i < count; i += block.threads)
    block.poll(layer, d, [&] { return load_relaxed(words + i) == epoch; });
  __threadfence();
  return block.sync_unless_stopped();
}
/// Copies `bytes` bytes of each token to shared memory, and waits for them. The tokens lie `from_row` bytes apart in
/// device memory and `to_row` bytes apart in shared memory. All auxiliary warps call.
__device__ inline void copy_tokens(Block& block, const char* from, long from_row, int bytes, char* to, int to_row) {
  const int warp = block.thread() / 32, tokens = block.c.dims.batch;
  if (block.thread() % 32 == 0) {
    std::uint64_t* const copied = block.signal_barrier(Signal::copied);
    let_copies_see();
    arrive_expecting(copied, (max(tokens - warp, 0) + kAuxiliaryWarps - 1) / kAuxiliaryWarps * bytes);
    for (int token = warp; token < tokens; token += kAuxiliaryWarps)
      copy_bulk(to + token * to_row, from + token * from_row, bytes, copied);
  }
  block.wait_for_copy(Signal::copied);
}

}  // namespace cf::cuda
