#pragma once
// Activations: a warp's slice of x, as operands in registers or in shared memory.
#include <type_traits>

#include "cuda/ops/linear/gptq_config.cuh"
#include "cuda/ops/linear/gptq_fragment.cuh"
#include "cuda/ops/linear/gptq_ring.cuh"

namespace cf::cuda {

/// The order in which a warp multiplies its slice's chunks. The sums of several tokens are scaled after every chunk, or
/// after every pair of chunks where a group is a whole number of pairs. A slice whose first chunk is odd begins in the
/// middle of a pair; that chunk then comes last, alone.
template <GptqConfig C>
struct GptqChunkOrder {
  bool in_pairs;
  int rotation, last;

  __device__ GptqChunkOrder(const GptqPlan& plan, const GptqSlice& slice)
      : in_pairs(!C.one_token() && plan.halves_a_group % 4 == 0 &&
                 (slice.count == kGptqMaxChunks || (slice.count + 1 == kGptqMaxChunks && slice.first % 2 == 0))),
        rotation(in_pairs ? slice.first & 1 : 0),
        last(rotation ? 0 : min(slice.count, kGptqMaxChunks) - 1) {}

  /// The slice's chunk that is multiplied i-th.
  __device__ int operator()(int i) const { return !C.one_token() && i + 1 == kGptqMaxChunks ? last : i + rotation; }
  /// Whether the sums are scaled after the i-th chunk.
  __device__ static bool ends_sum(bool pairs, int i) { return !pairs || i % 2 == 1 || i + 1 == kGptqMaxChunks; }
};

/// Eight of a token's activations from `column` of the tiles on. Without an order a column is the input of that number.
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

/// a or b. They come by value: the compiler would turn a choice between variables into one between their addresses, and
/// put the variables into local memory.
__device__ inline uint4 choose(bool first, uint4 a, uint4 b) { return first ? a : b; }

/// One token's slice of x in registers, as float16. A product has eight columns, and lanes 4n to 4n + 3 hold the
/// activations of column n, two vectors of each chunk. Every column takes one group of the slice, and zeros for the
/// other groups' chunks. So a group's sum meets its scale once, after the last chunk.
///
/// A float16 operand of codes takes fewer instructions than a bfloat16 one. So bfloat16 activations become float16. They
/// are multiplied by the power of two that brings the slice's largest to [2^14, 2^15), and the sums by its inverse. The
/// conversion is exact for activations above 2^-31 of the slice's largest. Smaller ones lose at most 2^-39 of the
/// largest, which is less than float32 sums lose.
template <class T, GptqConfig C>
class GptqOneTokenX {
 public:
  __device__ GptqOneTokenX(const GptqMatrix& m, const GptqPlan& plan, const GptqWarp& warp, const GptqChunkOrder<C>&,
                           const GptqSmem& at, int /*tokens*/)
      : m_(m), warp_(warp), at_(at) {
    const int from = (warp.slice.first_group + warp.g) * plan.halves_a_group / 2 - warp.slice.first;
    const int to = min(from + plan.halves_a_group / 2, warp.slice.count);
    chunks_ = to > max(from, 0) ? (1u << to) - (1u << max(from, 0)) : 0;
  }

  /// Loads the slice. x(0) points to the token's activations.
  template <class X>
  __device__ void load(X x) {
    const T* const token = x(0);
    if (by_way_of_smem()) {
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        const int v = warp_.lane + 32 * i, at = column(0, 0) + v * kVec;
        loaded_[i] = {};
        if (v >= warp_.slice.count * kChunkVectors) continue;
        if (m_.order)
          loaded_[i] = load_columns<true>(m_, token, at);
        else if (at < m_.in)
          loaded_[i] = load_columns<false>(m_, token, at);
      }
    } else {
      for_each_vector([&](int c, int i, bool has_group) {
        const int at = column(c, warp_.t + 4 * i);
        x_[c][i] = has_group && at < m_.in ? load_columns<false>(m_, token, at) : uint4{};
      });
    }
  }

  /// Puts every vector at its product column, and adds up the activations.
  __device__ void prepare() {
    if (by_way_of_smem()) {
      if constexpr (!std::is_same_v<T, f16>) make_float16();
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i)
        if (const int v = warp_.lane + 32 * i; v < kGptqMaxChunks * kChunkVectors) at_.x[v] = loaded_[i];
      __syncwarp();
      for_each_vector([&](int c, int i, bool has_group) {
        x_[c][i] = has_group ? at_.x[c * kChunkVectors + i * 4 + warp_.t] : uint4{};
      });
    }
    for_each_vector([&](int c, int i, bool) { add_up<f16>(x_[c][i], ones_[i]); });
    if constexpr (!C.sums_x_late()) sum_all();
  }
  /// Adds up the activations of all chunks. add_up() made two chains of products for it, whose results come late. Where
  /// C.sums_x_late(), the chains run beside the first tile's products.
  __device__ void sum_all() {
    const float all[] = {ones_[0][0] + ones_[1][0], 0, ones_[0][2] + ones_[1][2], 0};
    sums_ = sums_of_x(all, warp_.t);
  }

  /// The activations of a half of a chunk.
  __device__ const uint4& operator()(int chunk, int half) const { return x_[chunk][half]; }
  /// Sums of the activations of all chunks.
  __device__ const float2& sums() const { return sums_; }
  /// The factor that the sums of products still need.
  __device__ float unit() const { return unit_; }

 private:
  static constexpr int kChunkVectors = kGptqColumns / kVec;
  static constexpr int kLaneVectors = (kGptqMaxChunks * kChunkVectors + 31) / 32;

  /// Whether a lane loads up to two vectors, which the warp then exchanges in shared memory. So each bfloat16 vector is
  /// converted once, and each ordered one is gathered once. Otherwise a lane loads the vectors that it multiplies.
  __device__ bool by_way_of_smem() const { return !std::is_same_v<T, f16> || m_.order; }
  /// The first column of vector v of the slice's chunk c.
  __device__ int column(int c, int v) const { return (warp_.slice.first + c) * kGptqColumns + v * kVec; }
  /// Calls f(c, i, has_group) for vectors i = 0, 1 of all chunks. has_group says that chunk c is of the group of the
  /// lane's column.
  template <class F>
  __device__ void for_each_vector(F f) {
#pragma unroll
    for (int c = 0; c < kGptqMaxChunks; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) f(c, i, bool(chunks_ >> c & 1));
  }

  __device__ void make_float16() {
    std::uint32_t most = 0;  // as unsigned numbers, the bits of absolute values have the order of the values
    for_each_pair([&](std::uint32_t& pair) { most = __vmaxu2(most, pair & 0x7fff7fff); });
    most = __reduce_max_sync(~0u, max(most >> 16, most & 0xffff));
    // The exponent, within what keeps both factors normal numbers.
    const std::uint32_t exponent = min(max(most >> 7, 15u), 254u);
    const float factor = __uint_as_float(268 - exponent << 23);
    unit_ = __uint_as_float(exponent - 14 << 23);
    for_each_pair([&](std::uint32_t& pair) {
      const float2 x = unpack(pair, T{});
      pair = pack_pair<f16>(x.x * factor, x.y * factor);
    });
  }
  template <class F>
  __device__ void for_each_pair(F f) {
#pragma unroll
    for (uint4& v : loaded_) {
      f(v.x);
      f(v.y);
      f(v.z);
      f(v.w);
    }
  }

  const GptqMatrix& m_;
  const GptqWarp& warp_;
  const GptqSmem& at_;
  uint4 loaded_[kLaneVectors], x_[kGptqMaxChunks][2];
  float ones_[2][4] = {}, unit_ = 1;
  float2 sums_;
  std::uint32_t chunks_;  // bit c says that chunk c is of the group of the lane's column
};

/// Two to eight tokens in registers. A product has eight columns, each of which takes one token. Lanes 4n to 4n + 3 hold
/// the activations of column n, two vectors of each chunk. The sums of columns without a token are never read.
template <class T, GptqConfig C>
class GptqRegisterX {
 public:
  __device__ GptqRegisterX(const GptqMatrix& m, const GptqPlan&, const GptqWarp& warp, const GptqChunkOrder<C>& order,
                           const GptqSmem&, int tokens)
      : m_(m), warp_(warp), order_(order), tokens_(tokens) {}

  /// Loads all vectors. x(token) points to a token's activations.
  template <class X>
  __device__ void load(X x) {
    const auto column_of = [&](int c, int i) { return column(i) + order_(c) * kGptqColumns; };
    const GptqSlice& slice = warp_.slice;
    // A slice with four or five whole chunks loads every vector unconditionally. For a chunk that it lacks it loads
    // another of its chunks once more, and nothing reads that.
    const bool is_whole = slice.count + 1 >= kGptqMaxChunks && (slice.first + slice.count) * kGptqColumns <= m_.in;
    if (m_.order || !is_whole) [[unlikely]] {
#pragma unroll 1
      for (int at = 0; at < 2 * kGptqMaxChunks; ++at) {
        const int c = at / 2, i = at % 2;
        const T* const row = x(token_of_vector(i));
        uint4 v{};
        if (c < slice.count) {
          if (m_.order)
            v = load_columns<true>(m_, row, column_of(c, i));
          else if (column_of(c, i) < m_.in)
            v = load_columns<false>(m_, row, column_of(c, i));
        }
#pragma unroll
        for (int to = 0; to < 2 * kGptqMaxChunks; ++to) x_[to / 2][to % 2] = choose(to == at, v, x_[to / 2][to % 2]);
      }
    } else {
      const T* const rows[] = {x(token_of_vector(0)), x(token_of_vector(1))};
#pragma unroll
      for (int c = 0; c < kGptqMaxChunks; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) x_[c][i] = load_columns<false>(m_, rows[i], column_of(c, i));
    }
  }

  /// Puts every vector at its product column, and adds up the activations.
  __device__ void prepare() {
    __syncwarp();
    if (order_.in_pairs)
      prepare_chunks(std::true_type{});
    else
      prepare_chunks(std::false_type{});
  }

  /// The activations of a half of the chunk that is multiplied i-th.
  __device__ const uint4& operator()(int i, int half) const { return x_[i][half]; }
  /// Sums of the activations whose products are scaled together after the i-th chunk.
  __device__ const float2& sums(int i) const { return sums_[i]; }

 private:
  /// Whether lanes load lines for two columns and exchange halves. They do where x lies in device memory.
  static constexpr bool by_lines = !C.near_x;

  __device__ int token_of_vector(int i) const {
    return min(by_lines ? warp_.lane / 8 + 4 * i : gptq_token_of_column(warp_.g), tokens_ - 1);
  }
  /// The first column of vector i of the slice's first chunk.
  __device__ int column(int i) const {
    return warp_.slice.first * kGptqColumns + (by_lines ? warp_.lane % 8 * kVec : warp_.t * kVec + i * 32);
  }

  template <class Pairs>
  __device__ void prepare_chunks(Pairs) {
    float ones[4] = {};
#pragma unroll
    for (int c = 0; c < kGptqMaxChunks; ++c) {
      auto& [first, second] = x_[c];
      if constexpr (by_lines) {
        const bool is_odd = warp_.g % 2;
        const uint4 other = exchange(choose(is_odd, first, second), 4);
        first = choose(is_odd, other, first);
        second = choose(is_odd, second, other);
      }
      add_up<T>(first, ones);
      add_up<T>(second, ones);
      if (!GptqChunkOrder<C>::ends_sum(Pairs::value, c)) continue;
      sums_[c] = sums_of_x(ones, warp_.t);
#pragma unroll
      for (float& sum : ones) sum = 0;
    }
  }

  const GptqMatrix& m_;
  const GptqWarp& warp_;
  const GptqChunkOrder<C>& order_;
  const int tokens_;
  uint4 x_[kGptqMaxChunks][2];
  float2 sums_[kGptqMaxChunks];
};

/// Up to sixteen tokens in shared memory: [part][token], kGptqTokenBytes apart. A product's eight columns are those of
/// an octet of tokens.
template <class T, GptqConfig C>
class GptqSharedX {
 public:
  static constexpr int vectors = kGptqTokenBytes / 16;  // of 16 bytes, from one token to the next

  __device__ GptqSharedX(const GptqMatrix& m, const GptqPlan&, const GptqWarp& warp, const GptqChunkOrder<C>&,
                         const GptqSmem& at, int tokens)
      : m_(m), warp_(warp), at_(at), tokens_(tokens) {
#pragma unroll
    for (int o = 0; o < C.octets(); ++o)
      own_at_[o] = min(gptq_token_of_column(warp.g) + 8 * o, tokens - 1) * vectors + warp.t;
  }

  /// Copies the part's columns of all tokens. The part's warps share the tokens.
  template <class X>
  __device__ void load(X x) const {
    constexpr int at_once = 8 / C.octets();
    const GptqSlice& slice = warp_.slice;
    const std::uint32_t reciprocal = (0xffffu + slice.count) / max(slice.count, 1);  // 2^16 over the count, rounded up
    const int of_token = slice.count * 8, all = (tokens_ - warp_.turn + C.turns - 1) / C.turns * of_token;
#pragma unroll 1
    for (int first = warp_.lane; first < all; first += 32 * at_once) {
      const auto for_each_vector = [&](auto f) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int v = first + 32 * i, of = int(std::uint32_t(v) / 8 * reciprocal >> 16);
          if (v < all) f(i, warp_.turn + of * C.turns, v - of * of_token);
        }
      };
      uint4 loaded[at_once];
      for_each_vector([&](int i, int of, int v) {
        const int column = slice.first * kGptqColumns + v * kVec;
        loaded[i] = m_.order         ? load_columns<true>(m_, x(of), column)
                    : column < m_.in ? load_columns<false>(m_, x(of), column)
                                     : uint4{};
      });
      for_each_vector([&](int i, int of, int v) { at_.x[of * vectors + v] = loaded[i]; });
    }
  }

  /// Waits for all warps.
  __device__ void prepare() const { __syncthreads(); }

  /// The activations of half `half` of chunk c for octet o.
  __device__ uint4 operator()(int c, int half, int o) const { return at_.x[own_at_[o] + (2 * c + half) * 4]; }

 private:
  const GptqMatrix& m_;
  const GptqWarp& warp_;
  const GptqSmem& at_;
  const int tokens_;
  int own_at_[C.octets()];
};

}  // namespace cf::cuda
