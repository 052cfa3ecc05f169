#pragma once
// A block multiplies 128 rows of a weight by up to 128 tokens on Hopper's tensor cores. This file has the ring's
// barriers, the sum over a cluster's blocks and the epilogue. The caller makes operand a of the weights.
#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/output.cuh"
#include "cuda/ops/linear/wgmma/ring.cuh"
#include "cuda/runtime/tensor_map.hpp"

namespace cf::cuda {

inline constexpr int kWgmmaConsumers = 32 * kLinearWgmmaWarps;
inline constexpr int kWgmmaThreads = kWgmmaConsumers + 32;  // the last warp starts the copies

/// A block whose consumers need more registers than there are for each thread has a whole warpgroup beside them, which
/// gives them most of its own.
inline constexpr int kWgmmaMostThreads = kWgmmaConsumers + 128, kWgmmaRegisters = 240, kWgmmaCopyRegisters = 24;
static_assert(kWgmmaConsumers * kWgmmaRegisters + 128 * kWgmmaCopyRegisters <= kH200.registers_per_sm);

struct WgmmaCall {
  LinearOutput output;
  int tokens, steps, splits, stages;
};

inline WgmmaCall wgmma_call(const ops::Linear::Args& a, const LinearWgmmaPlan& plan) {
  const auto d = ops::Linear::dims(a);
  return {.output = linear_output(a),
          .tokens = int(d.tokens),
          .steps = int((d.in + kLinearWgmmaColumns - 1) / kLinearWgmmaColumns),
          .splits = plan.splits,
          .stages = plan.stages};
}

// Other devices' code has no use for what follows.
#ifdef CF_HAVE_WGMMA
/// The steps of a tile that block `rank` of its cluster takes, of `steps` in `splits`; none if there are fewer splits.
struct Steps {
  int first, count;
  __device__ Steps(int steps, int splits, int rank) : first(steps * rank / splits) {
    count = rank < splits ? steps * (rank + 1) / splits - first : 0;
  }
  __device__ Steps(const WgmmaCall& c, int rank) : Steps(c.steps, c.splits, rank) {}
};

/// Fills the ring with the `count` steps of a block. All lanes of a warp call. One of them makes the copies, in a loop
/// of few instructions, so that an empty stage waits little for its next copy. copy_weight(i, to, full) copies the
/// weights of step i. copy_x(i, to, full) copies the activations of step i. Weights do not depend on the kernel before
/// this one: the ring's first weights are copied before it has ended, and all activations after it.
template <class Ring, class CopyWeight, class CopyX>
__device__ void fill_ring(const Ring& ring, int count, CopyWeight copy_weight, CopyX copy_x) {
  if (elected()) {
    const auto copy_a = [&](int i, int stage) {
      arrive_expecting(ring.full + stage, ring.stage_bytes);
      copy_weight(i, ring.a(stage), ring.full + stage);
    };
    const int ahead = min(count, ring.stages);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) copy_a(i, i);
    wait_for_predecessors();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) copy_x(i, ring.b(i), ring.full + i);
    RingSlot slot;
#pragma unroll 1
    for (int i = ahead; i < count; ++i, slot.next(ring.stages)) {
      wait_barrier(ring.empty + slot.stage, slot.parity);
      copy_a(i, slot.stage);
      copy_x(i, ring.b(slot.stage), ring.full + slot.stage);
    }
  }
  __syncwarp();
}

/// Fills the ring with a block's steps of one product, whose activations are `x`. copy_weight(step, to, full) copies
/// the weights of step `step`.
template <class Ring, class CopyWeight>
__device__ void copy_steps(const Ring& ring, const Steps& steps, const CUtensorMap& x, CopyWeight copy_weight) {
  fill_ring(
      ring, steps.count, [&](int i, unsigned char* to, std::uint64_t* full) { copy_weight(steps.first + i, to, full); },
      [&](int i, unsigned char* to, std::uint64_t* full) {
        copy_tensor_tile(to, &x, (steps.first + i) * kLinearWgmmaColumns, 0, 0, full);
      });
}

/// A warpgroup's sums of 64 rows of a dense weight for Tokens tokens, over `count` steps of the ring from `slot` on. Up
/// to 64 tokens it waits for a step's products at once: they are short beside the step's copies, and the stage that
/// they release is asked for again before the next one has come.
template <class T, int Tokens>
__device__ void multiply_steps(const WgmmaRing<Tokens>& ring, int count, RingSlot& slot, float (&sum)[Tokens / 2]) {
  constexpr bool at_once = Tokens <= 64;
  const int group = threadIdx.x / 128;
  [[maybe_unused]] int last_stage = 0;
  keep_in_registers(sum);
#pragma unroll 1
  for (int i = 0; i < count; ++i, slot.next(ring.stages)) {
    wait_barrier(ring.full + slot.stage, slot.parity);
    const std::uint64_t a = tile_along_k(ring.a(slot.stage) + group * 64 * kTileRowBytes),
                        b = tile_along_k(ring.b(slot.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLinearWgmmaColumns / 16; ++k)
      wgmma(sum, a + k * kWgmmaStep, b + k * kWgmmaStep, i + k > 0, T{});
    wgmma_commit();
    if constexpr (at_once) {
      wgmma_wait<0>();
      if (threadIdx.x % 32 == 0) arrive(ring.empty + slot.stage);
    } else {
      wgmma_wait<1>();
      if (i > 0 && threadIdx.x % 32 == 0) arrive(ring.empty + last_stage);
      last_stage = slot.stage;
    }
  }
  wgmma_wait<0>();
  keep_in_registers(sum);
  if (!at_once && count > 0 && threadIdx.x % 32 == 0) arrive(ring.empty + last_stage);
}

/// The sums of the rows that a block finishes, in the ring's memory: a part (Tokens, 16 rows) for each warp that has
/// such rows, each product and each block of the cluster. Loops read the parts. Code that finishes the sums in the
/// registers has no loops: it is thousands of instructions that run once, and their fetch takes longer than the
/// product.
template <int Tokens, int Products>
struct Parts {
  // The sums of eight tokens and eight rows, in the order that wgmma() leaves them in a warp, lie in 32 different
  // banks.
  static constexpr int pitch = kLinearWgmmaPartPitch, floats = Tokens * pitch;
  float* first;
  int splits;

  /// The part of the `warp`-th of these warps, from block `rank`.
  __device__ float* part(int warp, int product, int rank) const {
    return first + ((warp * Products + product) * splits + rank) * floats;
  }
};

/// Hands a warp's sums to store(i, sum), with i the offset in a part.
template <int Tokens, class Store>
__device__ void for_each_sum(const float (&sum)[Tokens / 2], Store store) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Tokens / 2; ++i)
    store((i / 4 * 8 + 2 * t + i % 2) * kLinearWgmmaPartPitch + i % 4 / 2 * 8 + g, sum[i]);
}

/// Threads take rows by fours.
constexpr int kQuad = 4, kQuads = kLinearWgmmaWarpRows / kQuad;

/// The matrix's row that is row r of the tiles.
struct InOrder {
  static constexpr bool always = true;  // that of the same number
  __device__ bool holds() const { return true; }
  __device__ int row(int r) const { return r; }
};

/// The rows of `warps` warps, which a block finishes. A thread takes four rows of every step-th token.
template <int Tokens>
struct QuadRows {
  static constexpr int most_rounds = Tokens * kLinearWgmmaWarps * kQuads / kWgmmaConsumers;
  int quad, token, step;  // the thread's rows, its first token, and from one token to the next
  int rounds;             // the thread's tokens
  int row;                // the first of the thread's rows, of the matrix's `rows`

  __device__ QuadRows(int warps, int first_row, int tokens, long rows) {
    const int quads = warps * kQuads;
    quad = threadIdx.x % quads;
    token = threadIdx.x / quads;
    step = kWgmmaConsumers / quads;
    row = first_row + quad * kQuad;
    rounds = token < min(step, tokens) && row < rows ? (tokens - token + step - 1) / step : 0;
  }
};

/// The residuals of a thread's rows, from the thread's first element on: loaded before the sums are there.
template <class T, int Rounds>
struct Residuals {
  uint2 words[Rounds];

  __device__ void load(const T* from, int rounds, long pitch) {
#pragma unroll
    for (int i = 0; i < Rounds; ++i)
      if (i < rounds) words[i] = *reinterpret_cast<const uint2*>(from + i * pitch);
  }
  /// Adds the next residual.
  __device__ void add_next(float (&v)[kQuad]) {
    const float2 low = unpack(words[0].x, T{}), high = unpack(words[0].y, T{});
    v[0] += low.x;
    v[1] += low.y;
    v[2] += high.x;
    v[3] += high.y;
    // An index that is known at run time alone would put the array into memory.
#pragma unroll
    for (int r = 1; r < Rounds; ++r) words[r - 1] = words[r];
  }
};

/// Finishes the rows of one product; with gates four rows are two elements of y. Rows in another order have neither
/// residual nor gates.
template <class T, int Tokens, bool Gated, class Order>
struct Finish : QuadRows<Tokens> {
  using QuadRows<Tokens>::row, QuadRows<Tokens>::step, QuadRows<Tokens>::rounds;
  static constexpr int rows_of_output = Gated ? 2 : 1;
  const LinearOutput& to;
  const Order& order;
  long at;  // the thread's first element of y
  float bias[kQuad];
  Residuals<T, QuadRows<Tokens>::most_rounds> residuals;

  __device__ Finish(const LinearOutput& to, const Order& order, int warps, int first_row, int tokens)
      : QuadRows<Tokens>(warps, first_row, tokens, to.out * rows_of_output), to(to), order(order) {
    at = this->token * to.out + row / rows_of_output;
#pragma unroll
    for (int e = 0; e < kQuad; ++e)
      bias[e] = to.bias && rounds > 0 ? from_bits(bias_bits(to, order.row(row + e)), to.bias_dtype) : 0;
    if constexpr (!Gated)
      if (to.residual) residuals.load(static_cast<const T*>(to.residual) + at, rounds, step * to.out);
  }

  /// sums(product, quad, token) are the sums of a quad of rows.
  template <class SumsOf>
  __device__ void store(SumsOf sums) {
    T* y = static_cast<T*>(to.y) + at;
#pragma unroll 2
    for (int i = 0; i < rounds; ++i, y += step * to.out) {
      const float4 sum = sums(0, this->quad, this->token + i * step);
      float v[] = {sum.x + bias[0], sum.y + bias[1], sum.z + bias[2], sum.w + bias[3]};
      if constexpr (Gated) {
        float of_pairs[kQuad / 2];
        apply_gates(v, of_pairs);
        store_few(y, of_pairs);
      } else {
        if (to.residual) residuals.add_next(v);
        apply(to.epilogue, v);
        if (Order::always || order.holds())
          store_few(y, v);
        else
#pragma unroll
          for (int e = 0; e < kQuad; ++e) y[order.row(row + e) - row] = from_float<T>(v[e]);
      }
    }
  }
};

/// Makes the block's rows of one product or of several, with a sum each. One warp calls copy(ring, rank, first_row),
/// which fills the ring; the consumer warps call multiply(ring, rank, first_row, sum), which empties it, and then
/// make_finish(warps, first_row) and store() of what it makes. In a block of kWgmmaMostThreads the consumers take
/// kWgmmaRegisters.
template <int Tokens, int Products, class Ring, int Threads = kWgmmaThreads, class Copy, class Multiply,
          class MakeFinish>
__device__ void multiply_products(const WgmmaCall& c, Copy copy, Multiply multiply, MakeFinish make_finish) {
  extern __shared__ unsigned char smem[];
  __shared__ std::uint64_t full[kMostLinearWgmmaStages], empty[kMostLinearWgmmaStages], arrived;
  const Ring ring{
      .first = smem + (1024 - shared_address(smem) % 1024) % 1024, .full = full, .empty = empty, .stages = c.stages};
  if (threadIdx.x < c.stages) {
    init_barrier(full + threadIdx.x, 1);
    init_barrier(empty + threadIdx.x, kLinearWgmmaWarps);
    publish_barriers();
  }
  __syncthreads();
  let_successor_start();

  const int warp = same_in_warp(threadIdx.x / 32), rank = c.splits > 1 ? cluster_rank() : 0;
  const int first_row = int(blockIdx.x) / c.splits * kLinearWgmmaTileRows;
  ClusterInbox inbox(&arrived);
  const auto connect = [&] {
    if (c.splits > 1) {
      inbox.open();
      inbox.connect();
    }
  };
  if (warp >= kLinearWgmmaWarps) {
    if constexpr (Threads == kWgmmaMostThreads) give_registers<kWgmmaCopyRegisters>();
    if (warp == kLinearWgmmaWarps) copy(ring, rank, first_row);
    arrive_at_named_barrier(2, Threads);
    connect();
    return;
  }
  if constexpr (Threads == kWgmmaMostThreads) take_registers<kWgmmaRegisters>();
  float sum[Products][Tokens / 2] = {};
  multiply(ring, rank, first_row, sum);
  named_barrier(2, Threads);  // no warp reads the ring any more
  connect();
  const Parts<Tokens, Products> parts{reinterpret_cast<float*>(ring.first), c.splits};
  const int owner = warp * c.splits / kLinearWgmmaWarps;
#pragma unroll
  for (int p = 0; p < Products; ++p) {
    float* const to = parts.part(warp - linear_wgmma_first_warp(c.splits, owner), p, rank);
    if (owner == rank)
      for_each_sum<Tokens>(sum[p], [&](int i, float v) { to[i] = v; });
    else
      for_each_sum<Tokens>(sum[p], [out = ClusterOutbox(inbox, owner, to)](int i, float v) { out.send(i, v); });
  }

  const int first_warp = linear_wgmma_first_warp(c.splits, rank),
            warps = linear_wgmma_first_warp(c.splits, rank + 1) - first_warp;
  wait_for_predecessors();
  auto finish = make_finish(warps, first_row + first_warp * kLinearWgmmaWarpRows);
  named_barrier(1, kWgmmaConsumers);
  if (c.splits > 1)
    inbox.receive(warps * Products * (c.splits - 1) * Tokens * kLinearWgmmaWarpRows * int(sizeof(float)));
  finish.store([&](int product, int quad, int token) {
    const float* from = parts.part(quad / kQuads, product, 0) + token * parts.pitch + quad % kQuads * kQuad;
    float4 total{};
    for (int split = 0; split < c.splits; ++split, from += parts.floats) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      total.x += v.x;
      total.y += v.y;
      total.z += v.z;
      total.w += v.w;
    }
    return total;
  });
}

/// Makes the block's rows of one product by multiply_products(), and finishes them as elements of linear's output.
/// copy(ring, steps, first_row) fills the ring with the block's steps, and multiply(ring, steps, first_row, sum) makes
/// sums of them.
template <class T, int Tokens, bool Gated, class Ring, int Threads = kWgmmaThreads, class Order, class Copy,
          class Multiply>
__device__ void multiply_rows(const WgmmaCall& c, const Order& order, Copy copy, Multiply multiply) {
  multiply_products<Tokens, 1, Ring, Threads>(
      c, [&](const Ring& ring, int rank, int first_row) { copy(ring, Steps(c, rank), first_row); },
      [&](const Ring& ring, int rank, int first_row, float(&sum)[1][Tokens / 2]) {
        multiply(ring, Steps(c, rank), first_row, sum[0]);
      },
      [&](int warps, int first_row) {
        return Finish<T, Tokens, Gated, Order>(c.output, order, warps, first_row, c.tokens);
      });
}
#endif

}  // namespace cf::cuda
