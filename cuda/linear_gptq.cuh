#pragma once
// The product of a few tokens with a 4-bit weight matrix that is read once: block functions on tensor cores.
#include <type_traits>

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
  static constexpr float unit = 0x1p24f;  // that products are to be multiplied with
  static constexpr bool one_sum = false;  // for low and high codes
  static constexpr std::uint32_t ones = 0x00010001;

  __device__ static float whole(float low, float high) { return low + high * (1.f / 16); }
  __device__ static float zero(float stored) { return stored; }

  /// Eight codes: low[0], low[1], high[0], high[1] are the pairs of columns (0, 1), (2, 3), (4, 5), (6, 7).
  __device__ static void split(std::uint32_t word, std::uint32_t (&low)[2], std::uint32_t (&high)[2]) {
    low[0] = word & 0x000f000f;
    high[0] = word & 0x00f000f0;
    low[1] = word >> 8 & 0x000f000f;
    high[1] = word >> 8 & 0x00f000f0;
  }
};
template <>
struct GptqOperands<bf16> {
  static constexpr float unit = 1;
  static constexpr bool one_sum = true;
  static constexpr std::uint32_t ones = 0x3f803f80;

  __device__ static float whole(float low, float) { return low; }
  __device__ static float zero(float stored) { return stored + 128; }

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
  uint4* zeros;     // what stands for a token that is none, where x is not in registers
  uint4* x;         // the warp's part of every token
  float* partial;   // [tile][part][token][row] sums
  float* received;  // [rank - 1][tile][token][row] sums of the cluster's other blocks
  std::uint64_t* arrived;
  std::uint64_t* full;  // of each stage

  __device__ GptqSmem(const GptqPlan& p, char* smem, int warp) {
    const int elements = p.tiles * kGptqRows << p.token_bits, part = warp % kGptqParts;
    ring = smem + warp * p.stages * p.stage_bytes;
    smem += kGptqParts * p.turns * p.stages * p.stage_bytes;
    zeros = reinterpret_cast<uint4*>(smem + 64);  // in other banks than the first token
    x = zeros + (1 + part * p.tokens) * (kGptqTokenBytes / 16);
    smem += gptq_x_bytes(p);
    partial = reinterpret_cast<float*>(smem);
    received = partial + kGptqParts * elements;
    arrived = reinterpret_cast<std::uint64_t*>(received + (p.split - 1) * elements);
    full = arrived + 1 + warp * p.stages;
  }
};

/// Eight of a token's activations by column of the tiles. Ordered says that the matrix has an order, without which the
/// column is one of its inputs.
template <bool Ordered, class T>
__device__ uint4 load_columns(const GptqMatrix& m, const T* token, int column) {
  if constexpr (!Ordered) {
    return *reinterpret_cast<const uint4*>(token + column);
  } else {
    alignas(16) T gathered[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const int input = m.order[column + e];
      gathered[e] = input < 0 ? T{} : token[input];
    }
    return *reinterpret_cast<const uint4*>(gathered);
  }
}

/// A block's share of y = W x. T is float16 or bfloat16; Turns is the plan's; HalfChunks says that a group may end in the
/// middle of a chunk.
///   ready()                  called by all threads after the first weights' loads, before the first use of x
///   x(token)                 where a token's activations lie
///   begin(token, r)          called early for an element of the product
///   finish(token, r, sum, begun)   takes the element, once, with what its begin() returned; sum(r) is its sum, and
///                            sum(r ^ 1) its neighbour's
template <class T, int Turns, GptqTokens Tokens, bool HalfChunks, class Ready, class X, class Begin, class Finish>
__device__ void gptq_block(const GptqMatrix& m, const GptqPlan& plan, int tokens, Ready ready, X x, Begin begin,
                           Finish finish, char* smem) {
  using Operands = GptqOperands<T>;
  constexpr int threads = gptq_threads(Turns);
  constexpr bool one_token = Tokens == GptqTokens::one;
  constexpr int octets = Tokens == GptqTokens::sixteen ? 2 : 1;
  constexpr bool near_x = octets == 1 && !HalfChunks;  // the warp's part of x stays in registers
  constexpr int row_words = kGptqRows * 4, vectors = kGptqTokenBytes / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int part = warp % kGptqParts, turn = warp / kGptqParts;
  const int rank = plan.split == 1 ? 0 : int(blockIdx.x) % plan.split;
  const int first_tile = (plan.split == 1 ? int(blockIdx.x) : int(blockIdx.x) / plan.split) * plan.tiles;
  const int tiles = min(plan.tiles, m.tiles - first_tile);
  const GptqSlice slice = gptq_slice(plan, rank * kGptqParts + part);
  const GptqSmem at(plan, smem, warp);
  const int code_bytes = slice.count * kGptqTileBytes, scale_bytes = slice.groups * row_words;
  const std::uint32_t reciprocal = (0xffffu + slice.count) / max(slice.count, 1);  // 2^16 over the count, rounded up

  const auto request = [&](int tile, int stage) {
    const long of = first_tile + tile;
    char* const to = at.ring + stage * plan.stage_bytes;
    arrive_expecting(at.full + stage, code_bytes + scale_bytes);
    copy_bulk(to, m.codes + (of * m.chunks + slice.first) * kGptqTileBytes, code_bytes, at.full + stage);
    copy_bulk(to + code_bytes, m.scales + (of * m.groups + slice.first_group) * row_words, scale_bytes,
              at.full + stage);
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
  if constexpr (!near_x)
    if (threadIdx.x < vectors) at.zeros[threadIdx.x] = uint4{};

  ready();

  // Of x a lane holds the vectors of its token, or knows where they lie, from the zeros on. One token leaves seven of a
  // product's eight columns free: each takes a group of the slice, whose sum meets its scale after the last chunk, and
  // zeros for the other groups' chunks.
  uint4 own_x[near_x ? kGptqMaxChunks : 1][2];
  int own_at[octets];
  if constexpr (near_x) {
    const int from = one_token ? (slice.first_group + g) * plan.halves_a_group / 2 - slice.first : 0;
    const int to = one_token ? min(from + plan.halves_a_group / 2, slice.count) : g < tokens ? slice.count : 0;
    const T* const token = x(one_token ? 0 : g);
    const auto load = [&](auto ordered) {
#pragma unroll
      for (int c = 0; c < kGptqMaxChunks; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = (slice.first + c) * kGptqColumns + half * 32 + t * kVec;
          const bool there = from <= c && c < to && (ordered || column < m.in);
          own_x[c][half] = there ? load_columns<ordered>(m, token, column) : uint4{};
        }
    };
    if (m.order) [[unlikely]]
      load(std::true_type{});
    else
      load(std::false_type{});
  } else {
    constexpr int at_once = 8 / octets;
    const int of_token = slice.count * 8, all = (tokens - turn + Turns - 1) / Turns * of_token;
#pragma unroll 1
    for (int first = lane; first < all; first += 32 * at_once) {
      const auto for_each_vector = [&](auto f) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int v = first + 32 * i, of = int(std::uint32_t(v) / 8 * reciprocal >> 16);
          if (v < all) f(i, turn + of * Turns, v - of * of_token);
        }
      };
      uint4 loaded[at_once];
      for_each_vector([&](int i, int token, int v) {
        const int column = slice.first * kGptqColumns + v * kVec;
        loaded[i] = m.order         ? load_columns<true>(m, x(token), column)
                    : column < m.in ? load_columns<false>(m, x(token), column)
                                    : uint4{};
      });
      for_each_vector([&](int i, int token, int v) { at.x[token * vectors + v] = loaded[i]; });
    }
#pragma unroll
    for (int o = 0; o < octets; ++o)
      own_at[o] = (g + 8 * o < tokens ? int(at.x - at.zeros) + (g + 8 * o) * vectors : 0) + t;
    __syncthreads();
  }

  // Element e of the block: a row, then a token, then a tile.
  const int tile_elements = kGptqRows << plan.token_bits, elements = plan.tiles * tile_elements;
  const auto row_of = [&](int e) { return (first_tile + (e >> (4 + plan.token_bits))) * kGptqRows + e % kGptqRows; };
  const auto token_of = [&](int e) { return e / kGptqRows & ((1 << plan.token_bits) - 1); };
  const auto exists = [&](int e) { return e < tiles * tile_elements && token_of(e) < tokens && row_of(e) < m.out; };
  using Begun = decltype(begin(0, 0));
  const auto begin_element = [&](int e) { return exists(e) ? begin(token_of(e), row_of(e)) : Begun{}; };
  // What epilogues add is on its way while the product runs, where registers have room for it.
  Begun begun[2];
  if constexpr (!HalfChunks)
#pragma unroll
    for (int i = 0; i < 2; ++i) begun[i] = begin_element(threadIdx.x + i * threads);

  /// Products of codes and activations, and of ones and activations, which zeros are multiplied with.
  struct Sums {
    float low[4], high[4];
  };
  const auto multiply = [&](const uint4& codes, int half, const uint4& v, Sums& to) {
    std::uint32_t low[2], high[2], low8[2], high8[2];  // of row g and of row g + 8
    Operands::split(half ? codes.z : codes.x, low, high);
    Operands::split(half ? codes.w : codes.y, low8, high8);
    mma(to.low, low[0], low8[0], low[1], low8[1], v.x, v.y, T{});
    mma(Operands::one_sum ? to.low : to.high, high[0], high8[0], high[1], high8[1], v.z, v.w, T{});
  };
  const auto add_up = [](const uint4& v, Sums& to) {
    constexpr std::uint32_t ones = Operands::ones;
    mma(to.low, ones, ones, ones, ones, v.x, v.y, T{});
    mma(to.high, ones, ones, ones, ones, v.z, v.w, T{});
  };
  /// The scaled sum: element d is of row g + d / 2 * 8.
  const auto scaled = [&](const uint2& words, int d, const Sums& of, const float2& of_x) {
    const float2 row = unpack(d < 2 ? words.x : words.y, f16{});  // scale, zero
    return row.x * (Operands::whole(of.low[d], of.high[d]) - Operands::zero(row.y) * (d % 2 ? of_x.y : of_x.x));
  };
  /// The sums of the lane's two tokens' activations that meet the zeros of a chunk or, of one token, all.
  const auto sums_of_x = [&](int first, int last) {
    constexpr int chains = one_token ? 2 : 1;
    Sums ones[chains] = {};
#pragma unroll
    for (int half = first; half < last; ++half) add_up(own_x[half / 2][half % 2], ones[half % chains]);
    float2 sums{};
#pragma unroll
    for (const Sums& s : ones) {
      sums.x += s.low[0] + s.high[0];
      sums.y += s.low[1] + s.high[1];
    }
    return sums;
  };
  constexpr int halves_a_sum = one_token ? 2 * kGptqMaxChunks : 2;
  float2 own_sums[2 * kGptqMaxChunks / halves_a_sum];
  if constexpr (near_x)
#pragma unroll
    for (int i = 0; i < 2 * kGptqMaxChunks / halves_a_sum; ++i)
      own_sums[i] = sums_of_x(i * halves_a_sum, (i + 1) * halves_a_sum);

  int stage = 0, phase = 0;
#pragma unroll 1
  for (int tile = turn; tile < tiles; tile += Turns) {
    float sum[octets][4] = {};
    if (slice.count > 0) {
      wait_barrier(at.full + stage, phase);
      const char* const codes_at = at.ring + stage * plan.stage_bytes + lane * 16;
      const char* const scales_at = at.ring + stage * plan.stage_bytes + code_bytes + g * 8;
      const auto codes_of = [&](int c) { return *reinterpret_cast<const uint4*>(codes_at + c * kGptqTileBytes); };
      const auto scales_of = [&](int group) {  // of the slice
        return *reinterpret_cast<const uint2*>(scales_at + group * row_words);
      };
      if constexpr (one_token) {
        // But for the last, without a branch: chunks that a shorter slice does not have meet zeros.
        Sums sums{};
#pragma unroll
        for (int c = 0; c < kGptqMaxChunks; ++c) {
          if (c + 1 == kGptqMaxChunks && slice.count < kGptqMaxChunks) break;
          const uint4 codes = codes_of(c);
#pragma unroll
          for (int half = 0; half < 2; ++half) multiply(codes, half, own_x[c][half], sums);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 words = scales_of(min(2 * t + i, slice.groups - 1));
#pragma unroll
          for (int d = i; d < 4; d += 2) sum[0][d / 2 * 2] += scaled(words, d, sums, own_sums[0]);
        }
        sum[0][0] = warp_sum<4>(sum[0][0]);
        sum[0][2] = warp_sum<4>(sum[0][2]);
      } else {
        const auto words_of = [&](int c, int half) {
          return scales_of(gptq_group(plan, 2 * (slice.first + c) + (HalfChunks ? half : 0)) - slice.first_group);
        };
        if constexpr (near_x) {
#pragma unroll
          for (int c = 0; c < kGptqMaxChunks; ++c) {
            if (c >= slice.count) break;
            const uint4 codes = codes_of(c);
            Sums sums{};
#pragma unroll
            for (int half = 0; half < 2; ++half) multiply(codes, half, own_x[c][half], sums);
            const uint2 words = words_of(c, 0);
#pragma unroll
            for (int d = 0; d < 4; ++d) sum[0][d] += scaled(words, d, sums, own_sums[c]);
          }
        } else {
#pragma unroll 1
          for (int c = 0; c < slice.count; ++c) {
            const uint4 codes = codes_of(c);
            Sums sums[octets] = {}, ones[octets] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int o = 0; o < octets; ++o) {
                const uint4 v = at.zeros[own_at[o] + (2 * c + half) * 4];
                multiply(codes, half, v, sums[o]);
                add_up(v, ones[o]);
              }
              if (!HalfChunks && half == 0) continue;
              const uint2 words = words_of(c, half);
#pragma unroll
              for (int o = 0; o < octets; ++o) {
                const float2 of_x{ones[o].low[0] + ones[o].high[0], ones[o].low[1] + ones[o].high[1]};
#pragma unroll
                for (int d = 0; d < 4; ++d) sum[o][d] += scaled(words, d, sums[o], of_x);
                sums[o] = ones[o] = {};
              }
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
#pragma unroll 1
  for (int e = threadIdx.x; e < count; e += threads) {
    const auto sum_of = [&](int r) {
      const int of = e / kGptqRows * kGptqRows + r % kGptqRows;
      float sum = block_sum(of);
      for (int k = 1; k < plan.split; ++k) sum += at.received[(k - 1) * elements + of];  // in the ranks' order
      return sum;
    };
    if constexpr (HalfChunks) begun[0] = begin_element(e);
    if (exists(e)) finish(token_of(e), row_of(e), sum_of, begun[0]);
    if constexpr (!HalfChunks) {
      begun[0] = begun[1];
      begun[1] = begin_element(e + 2 * threads);
    }
  }
}

}  // namespace cf::cuda
