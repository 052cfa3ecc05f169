#pragma once
// The product of a warp's slice of one tile with the activations.
#include "cuda/ops/linear/packed/activations.cuh"

namespace cf::cuda {

/// Where a lane finds codes, and the scales and zeros of rows g and g + 8, in a stage of the ring.
template <GptqConfig C>
class GptqStage {
 public:
  __device__ GptqStage(const GptqPlan& plan, const GptqWarp& warp, const GptqChunkOrder<C>& order, int code_bytes)
      : plan_(plan), warp_(warp), code_bytes_(code_bytes) {
    const GptqSlice& slice = warp.slice;
#pragma unroll
    for (int i = 0; i < (C.one_token() ? 2 : (C.chunks + 1) / 2); ++i) {
      const int group = C.one_token() ? min(warp.t + kGptqOneTokenGroups * i, slice.groups - 1)
                                      : gptq_group(plan, 2 * (slice.first + order(2 * i))) - slice.first_group;
      known_[i] = code_bytes + warp.g * 8 + group * kGptqGroupBytes;
    }
  }

  /// The lane's codes of chunk c.
  __device__ uint4 codes(const char* stage, int c) const {
    return *reinterpret_cast<const uint4*>(stage + warp_.lane * 16 + c * kGptqTileBytes);
  }
  /// The scales whose place is known before the first tile. With one token they are group t + 4i's of the slice; with
  /// several tokens they are those of pair i of chunks.
  __device__ uint2 known_scales(const char* stage, int i) const {
    return *reinterpret_cast<const uint2*>(stage + known_[i]);
  }
  /// The scales of half `half` of chunk c.
  __device__ uint2 scales(const char* stage, int c, int half) const {
    const GptqSlice& slice = warp_.slice;
    const int group = gptq_group(plan_, 2 * (slice.first + c) + (C.half_chunks ? half : 0)) - slice.first_group;
    return *reinterpret_cast<const uint2*>(stage + code_bytes_ + warp_.g * 8 + group * kGptqGroupBytes);
  }

 private:
  const GptqPlan& plan_;
  const GptqWarp& warp_;
  const int code_bytes_;
  int known_[3];
};

// multiply_tile() makes the product of one tile. `from` is the tile's stage, and `sum` gets the sums. Each place where
// the activations may lie has a function of this name.

// A group's sums fit an int where the group has all columns of the longest slice, every code is 15 and every activation
// the largest.
static_assert(256ll * (15 * 16) * 128 * (kGptqOneTokenChunks * kGptqColumns / 2) < 1ll << 31);

/// Adds a group's sums, with their scales and zeros, to those of rows g and g + 8. `words` holds the scales and zeros,
/// `x` sixteen times the sum of the group's integers.
__device__ inline void add_scaled(const uint2& words, const DigitSums& of, float x, float (&sum)[4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float2 row = unpack(r ? words.y : words.x, f16{});  // scale, zero
    const float low = float(of.low[2 * r] + 256 * of.low[2 * r + 1]),
                high = float(of.high[2 * r] + 256 * of.high[2 * r + 1]);
    sum[2 * r] += row.x * (fmaf(16, low, high) - row.y * x);
  }
}

/// One token in registers. Columns 2t and 2t + 1 have the sums of group t of the slice. The four lanes of a row add up
/// the groups.
template <class T, GptqConfig C>
__device__ void multiply_tile(const char* from, const GptqStage<C>& stage, const GptqWarp&, const GptqChunkOrder<C>&,
                              bool is_first_tile, GptqOneTokenX<T, C>& x, float (&sum)[1][4]) {
  DigitSums sums{};
  if (is_first_tile) x.sum_all();
  const bool apart = x.has_fifth_group();
  x.for_each_chunk([&](int c) {
    if (c == kGptqOneTokenGroups && apart) [[unlikely]] {
      add_scaled(stage.known_scales(from, 0), sums, x.sums(), sum[0]);
      sums = {};
    }
    sums.add(stage.codes(from, c), x(c));
  });
  const uint2 scales = apart ? stage.known_scales(from, 1) : stage.known_scales(from, 0);
  add_scaled(scales, sums, apart ? x.sums_of_fifth() : x.sums(), sum[0]);
  sum[0][0] = warp_sum<4>(sum[0][0]) * x.factor();
  sum[0][2] = warp_sum<4>(sum[0][2]) * x.factor();
}

/// multiply_tile() for several tokens in registers. Sums are scaled after every chunk, or where InPairs is true after
/// every pair of chunks.
template <bool InPairs, class T, GptqConfig C>
__device__ void multiply_chunks(const char* from, const GptqStage<C>& stage, const GptqWarp& warp,
                                const GptqChunkOrder<C>& order, const GptqRegisterX<T, C>& x,
                                float (&sum)[C.octets()][4]) {
  GptqSums sums[C.octets()] = {};
#pragma unroll
  for (int i = 0; i < C.chunks; ++i) {
    if (!C.in_quads() && (!InPairs || i + 1 == C.chunks) && i >= warp.slice.count) break;
    const uint4 words = stage.codes(from, InPairs ? order(i) : i);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int o = 0; o < C.octets(); ++o) multiply<T>(words, half, x(i, half, o), sums[o]);
    if (!order.ends_sum(InPairs, i)) continue;
    const uint2 scale = InPairs ? stage.known_scales(from, i / 2) : stage.scales(from, i, 0);
#pragma unroll
    for (int o = 0; o < C.octets(); ++o) {
#pragma unroll
      for (int d = 0; d < 4; ++d) sum[o][d] += scaled<T>(scale, d, sums[o], x.sums(i, o));
      sums[o] = {};
    }
  }
}

template <class T, GptqConfig C>
__device__ void multiply_tile(const char* from, const GptqStage<C>& stage, const GptqWarp& warp,
                              const GptqChunkOrder<C>& order, bool /*is_first_tile*/, const GptqRegisterX<T, C>& x,
                              float (&sum)[C.octets()][4]) {
  if (C.in_quads() || order.in_pairs)
    multiply_chunks<true, T, C>(from, stage, warp, order, x, sum);
  else
    multiply_chunks<false, T, C>(from, stage, warp, order, x, sum);
}

/// multiply_tile() for activations in shared memory, whose sums over each half chunk are made along the way.
template <class T, GptqConfig C>
__device__ void multiply_tile(const char* from, const GptqStage<C>& stage, const GptqWarp& warp,
                              const GptqChunkOrder<C>& order, bool /*is_first_tile*/, const GptqSharedX<T, C>& x,
                              float (&sum)[C.octets()][4]) {
  GptqSums sums[C.octets()] = {};
  float ones[C.octets()][4] = {};
#pragma unroll 1
  for (int i = 0; i < warp.slice.count; ++i) {
    const int c = order(i);
    const uint4 words = stage.codes(from, c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int o = 0; o < C.octets(); ++o) {
        const uint4 v = x(c, half, o);
        multiply<T>(words, half, v, sums[o]);
        add_up<T>(v, ones[o]);
      }
      const uint2 scale = stage.scales(from, c, half);
#pragma unroll
      for (int o = 0; o < C.octets(); ++o) {
        const float2 of_x = sums_of_x(ones[o], warp.t);
#pragma unroll
        for (int d = 0; d < 4; ++d) sum[o][d] += scaled<T>(scale, d, sums[o], of_x);
        sums[o] = {};
#pragma unroll
        for (float& s : ones[o]) s = 0;
      }
    }
  }
}

}  // namespace cf::cuda
