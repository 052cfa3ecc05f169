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
///   prepare(token, r)            an element of the product, with what it needs of what no kernel before this one writes
///   ready()                      called by all threads after the first weights' loads, before the first use of x
///   x(token)                     where a token's activations lie
///   begin(element)               called early, after ready(): loads the rest of what the element needs
///   finish(element, sum, other)  takes the element, once: its sum, and that of row r ^ 1
/// A block runs for a few thousand cycles and most of its code once: what can be known before ready() is, while it waits.
template <class T, int Turns, GptqTokens Tokens, bool HalfChunks, class Prepare, class Ready, class X, class Begin,
          class Finish>
__device__ void gptq_block(const GptqMatrix& m, const GptqPlan& plan, int tokens, Prepare prepare, Ready ready, X x,
                           Begin begin, Finish finish, char* smem) {
  using Operands = GptqOperands<T>;
  constexpr int threads = gptq_threads(Turns);
  constexpr bool one_token = Tokens == GptqTokens::one;
  constexpr int octets = Tokens == GptqTokens::sixteen ? 2 : 1;
  constexpr bool near_x = octets == 1 && !HalfChunks;  // the warp's part of x stays in registers
  constexpr int row_words = kGptqRows * 4, vectors = kGptqTokenBytes / 16;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned warp = unsigned(same_in_warp(int(threadIdx.x / 32)));
  const int part = int(warp % kGptqParts), turn = Turns == 1 ? 0 : int(warp / kGptqParts);
  const int rank = cluster_rank(), first_tile = cluster_index() * plan.tiles;
  const int tiles = min(plan.tiles, m.tiles - first_tile);
  const GptqSlice slice = gptq_slice(plan, rank * kGptqParts + part);
  const GptqSmem at(plan, smem, int(warp));
  const int code_bytes = slice.count * kGptqTileBytes, scale_bytes = slice.groups * row_words;

  const long code_tile_bytes = long(m.chunks) * kGptqTileBytes, scale_tile_bytes = long(m.groups) * row_words;
  const char* const codes = m.codes + first_tile * code_tile_bytes + slice.first * kGptqTileBytes;
  const char* const scales = m.scales + first_tile * scale_tile_bytes + slice.first_group * row_words;
  const auto request = [&](int tile, int stage) {
    char* const to = at.ring + stage * plan.stage_bytes;
    arrive_expecting(at.full + stage, code_bytes + scale_bytes);
    copy_bulk(to, codes + tile * code_tile_bytes, code_bytes, at.full + stage);
    copy_bulk(to + code_bytes, scales + tile * scale_tile_bytes, scale_bytes, at.full + stage);
  };
  const auto request_stages = [&](int first, int end) {
#pragma unroll 1
    for (int i = first; i < end; ++i)
      if (const int tile = turn + i * Turns; tile < tiles) request(tile, i);
  };
  if (slice.count > 0 && elected()) {
#pragma unroll 1
    for (int i = 0; i < plan.stages; ++i) init_barrier(at.full + i, 1);
    publish_barriers();
    request_stages(0, plan.early);
  }
  __syncwarp();
  ClusterInbox inbox(at.arrived);
  if (plan.split > 1) inbox.open();
  if constexpr (!near_x)
    if (threadIdx.x < vectors) at.zeros[threadIdx.x] = uint4{};

  // Element e of the block: a row, then a token, then a tile. A thread prepares its first ones where registers have room
  // for them, each later one in the last place.
  const int tile_elements = kGptqRows << plan.token_bits, elements = plan.tiles * tile_elements;
  const int count = tiles * tile_elements;
  const auto row_of = [&](unsigned e) {
    return (first_tile + int(e >> (4 + plan.token_bits))) * kGptqRows + int(e % kGptqRows);
  };
  const auto token_of = [&](unsigned e) { return one_token ? 0 : int(e / kGptqRows & ((1u << plan.token_bits) - 1)); };
  const auto exists = [&](int e) { return e < count && token_of(unsigned(e)) < tokens && row_of(unsigned(e)) < m.out; };
  using Element = decltype(prepare(0, 0));
  constexpr int prepared = HalfChunks ? 0 : one_token ? 1 : 2;
  Element own[prepared + 1];
  bool is_own[prepared + 1];
#pragma unroll
  for (int i = 0; i < prepared; ++i) {
    const int e = threadIdx.x + i * threads;
    is_own[i] = exists(e);
    if (is_own[i]) own[i] = prepare(token_of(e), row_of(e));
  }

  // Of x a lane holds the vectors of its token, or knows where they lie, from the zeros on. One token leaves seven of a
  // product's eight columns free: each takes a group of the slice, whose sum meets its scale after the last chunk, and
  // zeros for the other groups' chunks.
  uint4 own_x[near_x ? kGptqMaxChunks : 1][2];
  int own_at[octets];
  const int token = one_token ? 0 : g;
  const int from = one_token ? (slice.first_group + g) * plan.halves_a_group / 2 - slice.first : 0;
  const int to = one_token ? min(from + plan.halves_a_group / 2, slice.count) : g < tokens ? slice.count : 0;
  const int first_column = slice.first * kGptqColumns + t * kVec;
  std::uint32_t there[2];  // a bit for each chunk of either half
  if constexpr (near_x)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = min(to, (m.in - first_column - half * 32 + kGptqColumns - 1) / kGptqColumns);
      there[half] = end > max(from, 0) ? (1u << end) - (1u << max(from, 0)) : 0;
    }

  ready();

  if constexpr (near_x) {
    const T* const token_x = x(token);
    if (m.order) [[unlikely]] {
#pragma unroll 1
      for (int i = 0; i < 2 * kGptqMaxChunks; ++i) {
        const uint4 v = from <= i / 2 && i / 2 < to ? load_columns<true>(m, token_x, first_column + i * 32) : uint4{};
#pragma unroll
        for (int c = 0; c < 2 * kGptqMaxChunks; ++c)
          if (c == i) own_x[c / 2][c % 2] = v;
      }
    } else {
#pragma unroll
      for (int c = 0; c < kGptqMaxChunks; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          own_x[c][half] = there[half] >> c & 1
                               ? *reinterpret_cast<const uint4*>(token_x + first_column + c * kGptqColumns + half * 32)
                               : uint4{};
    }
  } else {
    constexpr int at_once = 8 / octets;
    const std::uint32_t reciprocal = (0xffffu + slice.count) / max(slice.count, 1);  // 2^16 over the count, rounded up
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
      for_each_vector([&](int i, int of, int v) {
        const int column = slice.first * kGptqColumns + v * kVec;
        loaded[i] = m.order         ? load_columns<true>(m, x(of), column)
                    : column < m.in ? load_columns<false>(m, x(of), column)
                                    : uint4{};
      });
      for_each_vector([&](int i, int of, int v) { at.x[of * vectors + v] = loaded[i]; });
    }
#pragma unroll
    for (int o = 0; o < octets; ++o)
      own_at[o] = (g + 8 * o < tokens ? int(at.x - at.zeros) + (g + 8 * o) * vectors : 0) + t;
  }
#pragma unroll
  for (int i = 0; i < prepared; ++i)
    if (is_own[i]) begin(own[i]);
  if (slice.count > 0 && elected()) request_stages(plan.early, plan.stages);
  if constexpr (near_x)
    __syncwarp();
  else
    __syncthreads();

  /// Products of codes and activations, and of ones and activations, which zeros are multiplied with.
  struct Sums {
    float low[4], high[4];
  };
  const auto multiply = [&](const uint4& words, int half, const uint4& v, Sums& sums) {
    std::uint32_t low[2], high[2], low8[2], high8[2];  // of row g and of row g + 8
    Operands::split(half ? words.z : words.x, low, high);
    Operands::split(half ? words.w : words.y, low8, high8);
    mma(sums.low, low[0], low8[0], low[1], low8[1], v.x, v.y, T{});
    mma(Operands::one_sum ? sums.low : sums.high, high[0], high8[0], high[1], high8[1], v.z, v.w, T{});
  };
  const auto add_up = [](const uint4& v, Sums& sums) {
    constexpr std::uint32_t ones = Operands::ones;
    mma(sums.low, ones, ones, ones, ones, v.x, v.y, T{});
    mma(sums.high, ones, ones, ones, ones, v.z, v.w, T{});
  };
  /// The scaled sum: element d is of row g + d / 2 * 8.
  const auto scaled = [&](const uint2& words, int d, const Sums& of, const float2& of_x) {
    const float2 row = unpack(d < 2 ? words.x : words.y, f16{});  // scale, zero
    return row.x * (Operands::whole(of.low[d], of.high[d]) - Operands::zero(row.y) * (d % 2 ? of_x.y : of_x.x));
  };
  /// The sums of the lane's two tokens' activations that meet the zeros.
  Sums ones[2] = {};
  const auto sums_of_x = [](const Sums& of) { return float2{of.low[0] + of.high[0], of.low[1] + of.high[1]}; };
  // Of each chunk, or of one token of all: two chains of products then, which end beside the first tile's where
  // registers have room for them.
  constexpr bool beside = one_token && Turns == 1;
  const auto sum_of_all = [&] {
    const float2 first = sums_of_x(ones[0]), second = sums_of_x(ones[1]);
    return float2{first.x + second.x, first.y + second.y};
  };
  float2 own_sums[one_token ? 1 : kGptqMaxChunks];
  if constexpr (near_x)
#pragma unroll
    for (int c = 0; c < kGptqMaxChunks; ++c) {
      if constexpr (!one_token) ones[0] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) add_up(own_x[c][half], ones[one_token ? half : 0]);
      if constexpr (!one_token) own_sums[c] = sums_of_x(ones[0]);
    }
  if constexpr (one_token && !beside) own_sums[0] = sum_of_all();
  // Where the scales of one token's two groups lie.
  int own_scales[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) own_scales[i] = code_bytes + g * 8 + min(2 * t + i, slice.groups - 1) * row_words;

  float* to_partial = at.partial + (turn * kGptqParts + part) * tile_elements + g;
  int stage = 0, phase = 0;
#pragma unroll 1
  for (int tile = turn; tile < tiles; tile += Turns) {
    float sum[octets][4] = {};
    if (slice.count > 0) {
      const char* const from_stage = at.ring + stage * plan.stage_bytes;
      wait_barrier(at.full + stage, phase);
      const auto codes_of = [&](int c) {
        return *reinterpret_cast<const uint4*>(from_stage + lane * 16 + c * kGptqTileBytes);
      };
      if constexpr (one_token) {
        // But for the last, without a branch: chunks that a shorter slice does not have meet zeros.
        Sums sums{};
#pragma unroll
        for (int c = 0; c < kGptqMaxChunks; ++c) {
          if (c + 1 == kGptqMaxChunks && slice.count < kGptqMaxChunks) break;
          const uint4 words = codes_of(c);
#pragma unroll
          for (int half = 0; half < 2; ++half) multiply(words, half, own_x[c][half], sums);
        }
        if (beside && tile == turn) own_sums[0] = sum_of_all();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 words = *reinterpret_cast<const uint2*>(from_stage + own_scales[i]);
#pragma unroll
          for (int d = i; d < 4; d += 2) sum[0][d / 2 * 2] += scaled(words, d, sums, own_sums[0]);
        }
        sum[0][0] = warp_sum<4>(sum[0][0]);
        sum[0][2] = warp_sum<4>(sum[0][2]);
      } else {
        const auto words_of = [&](int c, int half) {
          const int group = gptq_group(plan, 2 * (slice.first + c) + (HalfChunks ? half : 0)) - slice.first_group;
          return *reinterpret_cast<const uint2*>(from_stage + code_bytes + g * 8 + group * row_words);
        };
        if constexpr (near_x) {
#pragma unroll
          for (int c = 0; c < kGptqMaxChunks; ++c) {
            if (c >= slice.count) break;
            const uint4 words = codes_of(c);
            Sums sums{};
#pragma unroll
            for (int half = 0; half < 2; ++half) multiply(words, half, own_x[c][half], sums);
            const uint2 scale = words_of(c, 0);
#pragma unroll
            for (int d = 0; d < 4; ++d) sum[0][d] += scaled(scale, d, sums, own_sums[c]);
          }
        } else {
#pragma unroll 1
          for (int c = 0; c < slice.count; ++c) {
            const uint4 words = codes_of(c);
            Sums sums[octets] = {}, ones_of[octets] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int o = 0; o < octets; ++o) {
                const uint4 v = at.zeros[own_at[o] + (2 * c + half) * 4];
                multiply(words, half, v, sums[o]);
                add_up(v, ones_of[o]);
              }
              if (!HalfChunks && half == 0) continue;
              const uint2 scale = words_of(c, half);
#pragma unroll
              for (int o = 0; o < octets; ++o) {
                const float2 of_x = sums_of_x(ones_of[o]);
#pragma unroll
                for (int d = 0; d < 4; ++d) sum[o][d] += scaled(scale, d, sums[o], of_x);
                sums[o] = ones_of[o] = {};
              }
            }
          }
        }
      }
      __syncwarp();
      if (const int next = tile + plan.stages * Turns; next < tiles && elected()) request(next, stage);
      if (++stage == plan.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if constexpr (one_token) {
      if (t == 0) {
        to_partial[0] = sum[0][0];
        to_partial[8] = sum[0][2];
      }
    } else {
#pragma unroll
      for (int o = 0; o < octets; ++o)
#pragma unroll
        for (int of = 0; of < 2; ++of)
          if (const int nth = 8 * o + 2 * t + of; nth < tokens) {
            to_partial[nth * kGptqRows] = sum[o][of];
            to_partial[nth * kGptqRows + 8] = sum[o][2 + of];
          }
    }
    to_partial += Turns * kGptqParts * tile_elements;
  }
  __syncthreads();

  const auto block_sum = [&](int e) {
    const float* of =
        at.partial + (unsigned(e) >> (4 + plan.token_bits)) * kGptqParts * tile_elements + (e & (tile_elements - 1));
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kGptqParts; ++p) sum += of[p * tile_elements];  // in the parts' order
    return sum;
  };
  if (rank > 0) {
    inbox.connect();
    for (int e = threadIdx.x; e < count; e += threads)
      inbox.send(0, at.received + (rank - 1) * elements + e, block_sum(e));
    return;
  }
  if (plan.split > 1) inbox.receive((plan.split - 1) * count * int(sizeof(float)));
  const auto finish_element = [&](int e, bool is_there, const Element& element) {
    float sum = 0;
    if (e < count) {
      sum = block_sum(e);
#pragma unroll 1
      for (int k = 1; k < plan.split; ++k) sum += at.received[(k - 1) * elements + e];  // in the ranks' order
      sum *= Operands::unit;
    }
    const float other = __shfl_xor_sync(~0u, sum, 1);
    if (is_there) finish(element, sum, other);
  };
#pragma unroll
  for (int i = 0; i < prepared; ++i)
    if (const int e = threadIdx.x + i * threads; e - lane < count) finish_element(e, is_own[i], own[i]);
#pragma unroll 1
  for (int e = threadIdx.x + prepared * threads; e - lane < count; e += threads) {
    is_own[prepared] = exists(e);
    if (is_own[prepared]) {
      own[prepared] = prepare(token_of(e), row_of(e));
      begin(own[prepared]);
    }
    finish_element(e, is_own[prepared], own[prepared]);
  }
}

}  // namespace cf::cuda
