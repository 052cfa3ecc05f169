#pragma once
// The product of a few tokens with a 4-bit weight matrix that is read once: block functions on tensor cores.
#include "core/ops/linear.hpp"
#include "cuda/device/async.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/linear_gptq.hpp"

namespace cf::cuda {

/// How codes become operands without an operation an element. In float16 the four bits of a code are, as they lie, the
/// subnormal number code * 2^-24, and those four bits higher 16 times that; tensor cores multiply subnormals exactly. A
/// bfloat16 has no such room: its 128 takes a code into its last bits and becomes 128 + code.
template <class T>
struct GptqOperands;
template <>
struct GptqOperands<f16> {
  static constexpr float unit = 0x1p24f, high = 1.f / 16, offset = 0;
  static constexpr std::uint32_t ones = 0x3c003c00;

  /// Eight codes: low[0], high[0], low[1], high[1] are the pairs of columns (0, 1), (2, 3), (4, 5), (6, 7).
  __device__ static void split(std::uint32_t word, std::uint32_t (&low)[2], std::uint32_t (&high)[2]) {
    low[0] = word & 0x000f000f;
    high[0] = word & 0x00f000f0;
    low[1] = word >> 8 & 0x000f000f;
    high[1] = word >> 8 & 0x00f000f0;
  }
};
template <>
struct GptqOperands<bf16> {
  static constexpr float unit = 1, high = 1, offset = 128;
  static constexpr std::uint32_t ones = 0x3f803f80;

  __device__ static void split(std::uint32_t word, std::uint32_t (&low)[2], std::uint32_t (&high)[2]) {
    low[0] = (word & 0x000f000f) | 0x43004300;
    high[0] = (word >> 4 & 0x000f000f) | 0x43004300;
    low[1] = (word >> 8 & 0x000f000f) | 0x43004300;
    high[1] = (word >> 12 & 0x000f000f) | 0x43004300;
  }
};

/// A block's shared memory, as one warp sees it.
struct GptqSmem {
  char* ring;       // stages of the warp's codes and scales
  uint4* x;         // the warp's part of every token
  uint4* zeros;     // what stands for a token that is none
  float* x_sums;    // [half or whole chunk][token] of the warp's part
  float* partial;   // [tile][part][token][row] sums
  float* received;  // [rank - 1][tile][token][row] sums of the cluster's other blocks
  std::uint64_t* arrived;
  std::uint64_t* full;  // of each stage

  __device__ GptqSmem(const GptqPlan& p, char* smem, int warp) {
    const int elements = p.tiles * kGptqRows << p.token_bits, part = warp % kGptqParts;
    ring = smem + warp * p.stages * p.stage_bytes;
    smem += kGptqParts * p.turns * p.stages * p.stage_bytes + 64;  // zeros lie in other banks than the first token
    zeros = reinterpret_cast<uint4*>(smem);
    smem += kGptqTokenBytes;
    x = reinterpret_cast<uint4*>(smem + part * p.tokens * kGptqTokenBytes);
    smem += kGptqParts * p.tokens * kGptqTokenBytes;
    x_sums = reinterpret_cast<float*>(smem) + part * kGptqSums;
    partial = reinterpret_cast<float*>(smem) + kGptqParts * kGptqSums;
    received = partial + kGptqParts * elements;
    arrived = reinterpret_cast<std::uint64_t*>(received + (p.split - 1) * elements);
    full = arrived + 1 + warp * p.stages;
  }
};

/// Eight of a token's activations by column of the tiles.
template <class T>
__device__ uint4 load_columns(const GptqMatrix& m, const T* token, int column) {
  if (!m.order) return column < m.in ? *reinterpret_cast<const uint4*>(token + column) : uint4{};
  alignas(16) T gathered[kVec];
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const int input = m.order[column + e];
    gathered[e] = input < 0 ? T{} : token[input];
  }
  return *reinterpret_cast<const uint4*>(gathered);
}

/// A block's share of y = W x for up to 16 tokens, or 8 where TwoTokens is false. T is float16 or bfloat16; Turns is
/// the plan's; Chunks is at least that of any warp's part; HalfChunks says that a group may end in the middle of a
/// chunk.
///   ready()                  called by all threads after the first weights' loads, before the first use of x
///   x(token, column)         16 bytes of a token's activations, by column of the tiles
///   begin(token, r)          called early for an element of the product
///   finish(token, r, sum, begun)   takes the element, once, with what its begin() returned; sum(r) is its sum, and
///                            sum(r ^ 1) its neighbour's
template <class T, int Turns, int Chunks, bool TwoTokens, bool HalfChunks, class Ready, class X, class Begin,
          class Finish>
__device__ void gptq_block(const GptqMatrix& m, const GptqPlan& plan, int tokens, Ready ready, X x, Begin begin,
                           Finish finish, char* smem) {
  using Operands = GptqOperands<T>;
  constexpr int threads = gptq_threads(Turns);
  constexpr int octets = TwoTokens ? 2 : 1;
  constexpr int row_words = kGptqRows * 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int part = warp % kGptqParts, turn = warp / kGptqParts;
  const int rank = plan.split == 1 ? 0 : int(blockIdx.x) % plan.split;
  const int first_tile = (plan.split == 1 ? int(blockIdx.x) : int(blockIdx.x) / plan.split) * plan.tiles;
  const int tiles = min(plan.tiles, m.tiles - first_tile);
  const GptqSlice slice = gptq_slice(plan, rank * kGptqParts + part);
  const GptqSmem at(plan, smem, warp);

  // What it needs is made anew each time, which is seldom: held over the product it would cost registers.
  const auto request = [&](int tile, int stage) {
    const int of_warp = thread_index() / 32;
    const GptqSlice own = gptq_slice(plan, rank * kGptqParts + of_warp % kGptqParts);
    const GptqSmem to(plan, smem, of_warp);
    const int code_bytes = own.count * kGptqTileBytes, scale_bytes = own.groups * row_words;
    const long of = first_tile + tile;
    char* const codes = to.ring + stage * plan.stage_bytes;
    arrive_expecting(to.full + stage, code_bytes + scale_bytes);
    copy_bulk(codes, m.codes + (of * m.chunks + own.first) * kGptqTileBytes, code_bytes, to.full + stage);
    copy_bulk(codes + Chunks * kGptqTileBytes, m.scales + (of * m.groups + own.first_group) * row_words, scale_bytes,
              to.full + stage);
  };
  if (lane == 0 && slice.count > 0) {
#pragma unroll 1
    for (int i = 0; i < plan.stages; ++i) init_barrier(at.full + i, 1);
    publish_barriers();
#pragma unroll 1
    for (int i = 0; i < plan.stages; ++i)
      if (const int tile = turn + i * Turns; tile < tiles) request(tile, i);
  }
  ClusterInbox inbox(at.arrived);
  if (threadIdx.x < kGptqTokenBytes / 16) at.zeros[threadIdx.x] = uint4{};
  ready();

  // Element e of the block: a row, then a token, then a tile.
  const int tile_elements = kGptqRows << plan.token_bits, elements = plan.tiles * tile_elements;
  const auto row_of = [&](int e) { return (first_tile + (e >> (4 + plan.token_bits))) * kGptqRows + e % kGptqRows; };
  const auto token_of = [&](int e) { return e / kGptqRows & ((1 << plan.token_bits) - 1); };
  const auto exists = [&](int e) { return e < tiles * tile_elements && token_of(e) < tokens && row_of(e) < m.out; };
  // Kept by each thread for itself: over the product they would cost registers.
  using Begun = decltype(begin(0, 0));
  __shared__ Begun begun_of[threads];
  Begun begun{};
  if (const int e = threadIdx.x; exists(e)) begun = begin(token_of(e), row_of(e));

  // The warp's part of x, and its sums over each part of a chunk, which the zeros are multiplied with.
  constexpr int vectors = kGptqTokenBytes / 16, sums_a_chunk = HalfChunks ? 2 : 1;
#pragma unroll 1
  for (int token = turn; token < tokens; token += Turns) {
    constexpr int steps = (Chunks * 8 + 31) / 32;
    uint4 v[steps];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      v[i] = uint4{};
      if (32 * i + lane < slice.count * 8) v[i] = x(token, slice.first * kGptqColumns + (32 * i + lane) * 8);
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      float f[kVec], sum = 0;
      unpack(v[i], f, T{});
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum += f[e];
#pragma unroll
      for (int offset = 1; offset < 8 / sums_a_chunk; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (32 * i + lane >= Chunks * 8) break;
      at.x[token * vectors + 32 * i + lane] = v[i];
      if (lane % (8 / sums_a_chunk) == 0)
        at.x_sums[(32 * i + lane) / (8 / sums_a_chunk) * (8 * octets) + token] = sum * (1 / Operands::unit);
    }
  }
  begun_of[threadIdx.x] = begun;
  __syncthreads();
  const uint4* own[octets];
#pragma unroll
  for (int o = 0; o < octets; ++o) own[o] = (g + 8 * o < tokens ? at.x + (g + 8 * o) * vectors : at.zeros) + t;

  int stage = 0, phase = 0;
#pragma unroll 1
  for (int tile = turn; tile < tiles; tile += Turns) {
    float sum[octets][4] = {};
    if (slice.count > 0) {
      wait_barrier(at.full + stage, phase);
      const char* const codes_at = at.ring + stage * plan.stage_bytes + lane * 16;
      const char* const scales_at =
          at.ring + stage * plan.stage_bytes + Chunks * kGptqTileBytes + g * 8 - slice.first_group * row_words;
      // No branch: chunks that a shorter slice does not have meet activations of zero, and overlap in flight.
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        const uint4 codes = *reinterpret_cast<const uint4*>(codes_at + c * kGptqTileBytes);
        float low_sum[octets][4] = {}, high_sum[octets][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          std::uint32_t low[2], high[2], low8[2], high8[2];  // of row g and of row g + 8
          Operands::split(half ? codes.z : codes.x, low, high);
          Operands::split(half ? codes.w : codes.y, low8, high8);
#pragma unroll
          for (int o = 0; o < octets; ++o) {
            const uint4 v = own[o][(2 * c + half) * 4];
            mma(low_sum[o], low[0], low8[0], low[1], low8[1], v.x, v.z, T{});
            mma(Operands::high == 1 ? low_sum[o] : high_sum[o], high[0], high8[0], high[1], high8[1], v.y, v.w, T{});
          }
          if (!HalfChunks && half == 0) continue;
          const int i = HalfChunks ? 2 * c + half : c;
          const int group =
              gptq_group(plan, 2 * min(slice.first + c, slice.first + slice.count - 1) + (HalfChunks ? half : 0));
          const uint2 words = *reinterpret_cast<const uint2*>(scales_at + group * row_words);
#pragma unroll
          for (int o = 0; o < octets; ++o) {
            const float2 total = *reinterpret_cast<const float2*>(at.x_sums + i * (8 * octets) + 8 * o + 2 * t);
#pragma unroll
            for (int d = 0; d < 4; ++d) {
              const float2 row = unpack(d < 2 ? words.x : words.y, f16{});  // scale, zero
              const float coded = Operands::high == 1 ? low_sum[o][d] : low_sum[o][d] + high_sum[o][d] * Operands::high;
              sum[o][d] += row.x * (coded - (row.y + Operands::offset) * (d % 2 ? total.y : total.x));
              if (HalfChunks) low_sum[o][d] = high_sum[o][d] = 0;
            }
          }
        }
      }
      __syncwarp();
      if (const int next = tile + plan.stages * Turns; lane == 0 && next < tiles) request(next, stage);
      if (++stage == plan.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    float* const to = at.partial + (tile * kGptqParts + part) * tile_elements + g;
#pragma unroll
    for (int o = 0; o < octets; ++o)
#pragma unroll
      for (int of = 0; of < 2; ++of)
        if (const int token = 8 * o + 2 * t + of; token < tokens) {
          to[token * kGptqRows] = Operands::unit * sum[o][of];
          to[token * kGptqRows + 8] = Operands::unit * sum[o][2 + of];
        }
  }
  __syncthreads();

  const int count = tiles * tile_elements;
  const auto block_sum = [&](int e) {
    const float* from =
        at.partial + (e >> (4 + plan.token_bits)) * kGptqParts * tile_elements + (e & (tile_elements - 1));
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kGptqParts; ++p) sum += from[p * tile_elements];  // in the parts' order
    return sum;
  };
  if (rank > 0) {
    inbox.connect();
    for (int e = threadIdx.x; e < count; e += threads)
      inbox.send(0, at.received + (rank - 1) * elements + e, block_sum(e));
    return;
  }
  if (plan.split > 1) inbox.receive((plan.split - 1) * count * int(sizeof(float)));
  begun = begun_of[threadIdx.x];
#pragma unroll 1
  for (int e = threadIdx.x; e < count; e += threads) {
    const auto sum_of = [&](int r) {
      const int of = e / kGptqRows * kGptqRows + r % kGptqRows;
      float sum = block_sum(of);
      for (int k = 1; k < plan.split; ++k) sum += at.received[(k - 1) * elements + of];  // in the ranks' order
      return sum;
    };
    if (exists(e)) finish(token_of(e), row_of(e), sum_of, begun);
    if (const int next = e + threads; exists(next)) begun = begin(token_of(next), row_of(next));
  }
}

}  // namespace cf::cuda
