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
  uint4* x;         // the warp's part of every token, where it is not in registers
  float* partial;   // [tile][part][token][row] sums, of every second two tokens with rows 8 .. 15 before 0 .. 7
  float* received;  // [other rank][element] sums of the block's share, of the cluster's other blocks
  std::uint64_t* arrived;
  std::uint64_t* full;  // of each stage

  __device__ GptqSmem(const GptqPlan& p, char* smem, int warp) {
    const int elements = p.tiles * kGptqRows << p.token_bits, part = warp % kGptqParts;
    ring = smem + warp * p.stages * p.stage_bytes;
    smem += kGptqParts * p.turns * p.stages * p.stage_bytes;
    x = reinterpret_cast<uint4*>(smem + part * p.tokens * kGptqTokenBytes);
    smem += gptq_x_bytes(p);
    partial = reinterpret_cast<float*>(smem);
    received = partial + kGptqParts * elements;
    arrived = reinterpret_cast<std::uint64_t*>(received + (p.split - 1) * p.share);
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
/// middle of a chunk, NearX that x lies close by, in shared memory.
///   prepare(token, r)            an element of the product: Rows rows of a token from r on, with what it needs of what
///                                no kernel before this one writes
///   ready()                      called by all threads after the first weights' loads, before the first use of x
///   x(token)                     where a token's activations lie
///   begin(element)               called early, after ready(): loads the rest of what the element needs
///   finish(element, sums)        takes the element, once, with its rows' sums; of one row with that of row r ^ 1, too
/// A block runs for a few thousand cycles and most of its code once: what can be known before ready() is, while it waits.
template <class T, int Turns, GptqTokens Tokens, bool HalfChunks, bool NearX, int Rows, class Prepare, class Ready,
          class X, class Begin, class Finish>
__device__ void gptq_block(const GptqMatrix& m, const GptqPlan& plan, int tokens, Prepare prepare, Ready ready, X x,
                           Begin begin, Finish finish, char* smem) {
  using Operands = GptqOperands<T>;
  constexpr int threads = gptq_threads(Turns);
  constexpr bool one_token = Tokens == GptqTokens::one;
  constexpr int octets = Tokens == GptqTokens::sixteen ? 2 : 1;
  constexpr bool x_in_registers = octets == 1 && !HalfChunks;  // the warp's part of it
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

  // The sums of a cluster are of rows, of a token's then, of a tile's then; the block finishes those from first_own on,
  // as `count` elements of Rows each. A thread prepares its first ones where registers have room for them, each later
  // one in the last place.
  const int tile_elements = kGptqRows << plan.token_bits, all = tiles * tile_elements;
  const bool shared_out = !one_token && plan.share < plan.tiles * tile_elements;
  const int first_own = shared_out ? rank * plan.share : 0;
  const int count = (shared_out ? max(min(all - first_own, plan.share), 0) : rank == 0 ? all : 0) / Rows;
  const auto row_of = [&](unsigned e) {
    const unsigned first = first_own + e * Rows;
    return (first_tile + int(first >> (4 + plan.token_bits))) * kGptqRows + int(first % kGptqRows);
  };
  const auto token_of = [&](unsigned e) {
    return one_token ? 0 : int((first_own + e * Rows) / kGptqRows & ((1u << plan.token_bits) - 1));
  };
  const auto exists = [&](int e) { return e < count && token_of(unsigned(e)) < tokens && row_of(unsigned(e)) < m.out; };
  using Element = decltype(prepare(0, 0));
  constexpr int prepared = HalfChunks ? 0 : one_token || Rows > 1 ? 1 : 2;
  Element own[prepared + 1];
  bool is_own[prepared + 1];
#pragma unroll
  for (int i = 0; i < prepared; ++i) {
    const int e = threadIdx.x + i * threads;
    is_own[i] = exists(e);
    if (is_own[i]) own[i] = prepare(token_of(e), row_of(e));
  }

  // Several tokens' sums of a group are scaled together where groups are pairs of chunks. An odd slice begins within
  // one: its first chunk comes last then, alone.
  const bool in_pairs = !one_token && plan.halves_a_group % 4 == 0 &&
                        (slice.count == kGptqMaxChunks || (slice.count + 1 == kGptqMaxChunks && slice.first % 2 == 0));
  const int rotation = in_pairs ? slice.first & 1 : 0;
  const int last_chunk = rotation ? 0 : min(slice.count, kGptqMaxChunks) - 1;
  const auto chunk_of = [&](int i) { return !one_token && i + 1 == kGptqMaxChunks ? last_chunk : i + rotation; };
  const auto ends_sum = [](bool pairs, int i) { return !pairs || i % 2 == 1 || i + 1 == kGptqMaxChunks; };

  // A product has eight columns, lanes 4g to 4g + 3 the activations of column g, two vectors of a chunk each. One token
  // leaves seven columns free: each takes a group of the slice, whose sum meets its scale after the last chunk, and zeros
  // for the other groups' chunks. Of several tokens each has one; what is in columns without a token is never read.
  // From device memory eight lanes load a whole line of a token for two columns, which exchange halves after: lines of
  // tokens 0 to 3, then of 4 to 7, so that column g has token g / 2 + g % 2 * 4.
  constexpr bool by_lines = x_in_registers && !one_token && !NearX;
  const auto token_of_column = [](int n) { return one_token ? 0 : n / 2 + n % 2 * 4; };
  uint4 own_x[x_in_registers ? kGptqMaxChunks : 1][2];
  const auto token_of_vector = [&](int i) { return min(by_lines ? lane / 8 + 4 * i : token_of_column(g), tokens - 1); };
  const auto column_of_vector = [&](int i) {
    return slice.first * kGptqColumns + (by_lines ? lane % 8 * kVec : t * kVec + i * 32);
  };
  int own_at[octets];  // where it lies in shared memory
#pragma unroll
  for (int o = 0; o < octets; ++o) own_at[o] = min(token_of_column(g) + 8 * o, tokens - 1) * vectors + t;
  std::uint32_t there[2];  // of one token's, a bit for each chunk
  if constexpr (one_token)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = (slice.first_group + g) * plan.halves_a_group / 2 - slice.first;
      const int to = min(from + plan.halves_a_group / 2, slice.count);
      const int end = m.order ? to : min(to, (m.in - column_of_vector(i) + kGptqColumns - 1) / kGptqColumns);
      there[i] = end > max(from, 0) ? (1u << end) - (1u << max(from, 0)) : 0;
    }

  ready();

  if constexpr (x_in_registers) {
    const auto row = [&](int i) { return x(token_of_vector(i)); };
    const auto column = [&](int c, int i) { return column_of_vector(i) + chunk_of(c) * kGptqColumns; };
    // Of several tokens a slice that is all there loads every vector without a question, for a chunk that it lacks one
    // of its own again, which nothing reads.
    const bool is_whole = slice.count + 1 >= kGptqMaxChunks && (slice.first + slice.count) * kGptqColumns <= m.in;
    if (m.order || !(one_token || is_whole)) [[unlikely]] {
#pragma unroll 1
      for (int at = 0; at < 2 * kGptqMaxChunks; ++at) {
        const int c = at / 2, i = at % 2;
        uint4 v{};
        if (one_token ? (i ? there[1] : there[0]) >> c & 1 : c < slice.count) {
          if (m.order)
            v = load_columns<true>(m, row(i), column(c, i));
          else if (column(c, i) < m.in)
            v = load_columns<false>(m, row(i), column(c, i));
        }
#pragma unroll
        for (int to = 0; to < 2 * kGptqMaxChunks; ++to)
          if (to == at) own_x[to / 2][to % 2] = v;
      }
    } else {
#pragma unroll
      for (int c = 0; c < kGptqMaxChunks; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          own_x[c][i] = !one_token || there[i] >> c & 1 ? load_columns<false>(m, row(i), column(c, i)) : uint4{};
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
  }
#pragma unroll
  for (int i = 0; i < prepared; ++i)
    if (is_own[i]) begin(own[i]);
  if (slice.count > 0 && elected()) request_stages(plan.early, plan.stages);
  // While x is on its way: where the scales of one token's two groups lie, or of several tokens' pairs.
  int own_scales[3];
#pragma unroll
  for (int i = 0; i < (one_token ? 2 : 3); ++i) {
    const int group = one_token ? min(2 * t + i, slice.groups - 1)
                                : gptq_group(plan, 2 * (slice.first + chunk_of(2 * i))) - slice.first_group;
    own_scales[i] = code_bytes + g * 8 + group * row_words;
  }
  // And where the lane's sums of rows g and g + 8 go, of token t.
  float* to_partial[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    to_partial[i] = at.partial + (turn * kGptqParts + part) * tile_elements +
                    (one_token ? g + 8 * i : t * kGptqRows + (g + 8 * i ^ (t & 2) * 4));
  if constexpr (x_in_registers)
    __syncwarp();
  else
    __syncthreads();

  /// Products of codes and activations.
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
  /// The products of ones and activations: as the operand of sixteen rows these are twice as many a product as in its
  /// columns.
  const auto add_up = [](const uint4& v, float(&sums)[4]) {
    constexpr std::uint32_t ones = Operands::ones;
    mma(sums, v.x, v.y, v.z, v.w, ones, ones, T{});
  };
  /// The scaled sum: element d is of row g + d / 2 * 8.
  const auto scaled = [&](const uint2& words, int d, const Sums& of, const float2& of_x) {
    const float2 row = unpack(d < 2 ? words.x : words.y, f16{});  // scale, zero
    return row.x * (Operands::whole(of.low[d], of.high[d]) - Operands::zero(row.y) * (d % 2 ? of_x.y : of_x.x));
  };
  /// The sums of the activations of the lane's two columns, 2t and 2t + 1, which meet the zeros.
  float ones[2][4] = {};
  const auto sums_of_x = [&](const float(&of)[4]) {
    const float sum = of[0] + of[2];  // of column g
    return float2{__shfl_sync(~0u, sum, 8 * t), __shfl_sync(~0u, sum, 8 * t + 4)};
  };
  // Of each chunk, or of one token of all: two chains of products then, which end beside the first tile's where
  // registers have room for them.
  constexpr bool beside = one_token && Turns == 1;
  const auto sum_of_all = [&] {
    const float all[] = {ones[0][0] + ones[1][0], 0, ones[0][2] + ones[1][2], 0};
    return sums_of_x(all);
  };
  float2 own_sums[one_token ? 1 : kGptqMaxChunks];
  const auto sum_x = [&](auto pairs) {
#pragma unroll
    for (int c = 0; c < kGptqMaxChunks; ++c) {
      auto& [first, second] = own_x[c];
      if constexpr (by_lines) {
        const bool is_odd = g % 2;
        // Of values: a choice between the variables would be one of addresses, for which they would lie in memory.
        const auto choose = [](bool yes, uint4 a, uint4 b) { return yes ? a : b; };
        const uint4 other = exchange(choose(is_odd, first, second), 4);
        first = choose(is_odd, other, first);
        second = choose(is_odd, second, other);
      }
      add_up(first, ones[0]);
      add_up(second, ones[one_token ? 1 : 0]);
      if constexpr (!one_token)
        if (ends_sum(pairs.value, c)) {
          own_sums[c] = sums_of_x(ones[0]);
#pragma unroll
          for (float& sum : ones[0]) sum = 0;
        }
    }
  };
  if constexpr (x_in_registers) {
    if (in_pairs)
      sum_x(std::true_type{});
    else
      sum_x(std::false_type{});
  }
  if constexpr (one_token && !beside) own_sums[0] = sum_of_all();
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
        if constexpr (x_in_registers) {
          const auto add_chunks = [&](auto pairs) {
            Sums sums{};
#pragma unroll
            for (int i = 0; i < kGptqMaxChunks; ++i) {
              if ((!pairs.value || i + 1 == kGptqMaxChunks) && i >= slice.count) break;
              const uint4 words = codes_of(pairs.value ? chunk_of(i) : i);
#pragma unroll
              for (int half = 0; half < 2; ++half) multiply(words, half, own_x[i][half], sums);
              if (!ends_sum(pairs.value, i)) continue;
              const uint2 scale =
                  pairs.value ? *reinterpret_cast<const uint2*>(from_stage + own_scales[i / 2]) : words_of(i, 0);
#pragma unroll
              for (int d = 0; d < 4; ++d) sum[0][d] += scaled(scale, d, sums, own_sums[i]);
              sums = {};
            }
          };
          if (in_pairs)
            add_chunks(std::true_type{});
          else
            add_chunks(std::false_type{});
        } else {
          Sums sums[octets] = {};
          float ones_of[octets][4] = {};
#pragma unroll 1
          for (int i = 0; i < slice.count; ++i) {
            const int c = chunk_of(i);
            const uint4 words = codes_of(c);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int o = 0; o < octets; ++o) {
                const uint4 v = at.x[own_at[o] + (2 * c + half) * 4];
                multiply(words, half, v, sums[o]);
                add_up(v, ones_of[o]);
              }
              if (!HalfChunks && (half == 0 || !ends_sum(in_pairs, i))) continue;
              const uint2 scale = words_of(c, half);
#pragma unroll
              for (int o = 0; o < octets; ++o) {
                const float2 of_x = sums_of_x(ones_of[o]);
#pragma unroll
                for (int d = 0; d < 4; ++d) sum[o][d] += scaled(scale, d, sums[o], of_x);
                sums[o] = {};
#pragma unroll
                for (float& s : ones_of[o]) s = 0;
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
        *to_partial[0] = sum[0][0];
        *to_partial[1] = sum[0][2];
      }
    } else {
#pragma unroll
      for (int o = 0; o < octets; ++o)
#pragma unroll
        for (int of = 0; of < 2; ++of)
          if (const int from_t = 8 * o + 4 * of; t + from_t < tokens) {
            to_partial[0][from_t * kGptqRows] = sum[o][of];
            to_partial[1][from_t * kGptqRows] = sum[o][2 + of];
          }
    }
#pragma unroll
    for (float*& to : to_partial) to += Turns * kGptqParts * tile_elements;
  }
  __syncthreads();

  /// The sums of rows from the block's `first` on, added up in the parts' order.
  const auto sum_block = [&](unsigned first, auto& sum) {
    unsigned in_tile = first & unsigned(tile_elements - 1);
    if constexpr (!one_token) in_tile ^= in_tile >> 2 & 8;
    const float* of = at.partial + (first >> (4 + plan.token_bits)) * kGptqParts * tile_elements + in_tile;
#pragma unroll
    for (float& s : sum) s = 0;
#pragma unroll
    for (int p = 0; p < kGptqParts; ++p) add_few(of + p * tile_elements, sum);
  };
  if (plan.split > 1) {
    inbox.connect();
    if (shared_out || rank > 0)
      for (int e = 4 * int(threadIdx.x); e < all; e += 4 * threads) {
        const int to = shared_out ? e / plan.share : 0;
        if (to == rank) continue;
        float sum[4];
        sum_block(e, sum);
        inbox.send(to, at.received + (rank - (rank > to) - to) * plan.share + e, sum);
      }
    if (count == 0) return;
    inbox.receive((plan.split - 1) * count * Rows * int(sizeof(float)));
  }
  const auto finish_element = [&](int e, bool is_there, const Element& element) {
    float sum[Rows] = {};
    if (e < count) {
      sum_block(first_own + e * Rows, sum);
      // In the ranks' order, whoever finishes.
      const auto add_received = [&](int k, float(&to)[Rows]) { add_few(at.received + k * plan.share + e * Rows, to); };
      if (shared_out) {
        float before[Rows] = {};
#pragma unroll 1
        for (int k = 0; k < rank; ++k) add_received(k, before);
#pragma unroll
        for (int i = 0; i < Rows; ++i) sum[i] = rank > 0 ? before[i] + sum[i] : sum[i];
      }
#pragma unroll 1
      for (int k = rank; k < plan.split - 1; ++k) add_received(k, sum);
#pragma unroll
      for (float& s : sum) s *= Operands::unit;
    }
    if constexpr (Rows == 1) {
      const float both[] = {sum[0], __shfl_xor_sync(~0u, sum[0], 1)};
      if (is_there) finish(element, both);
    } else {
      if (is_there) finish(element, sum);
    }
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
