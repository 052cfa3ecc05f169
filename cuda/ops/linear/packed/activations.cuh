#pragma once
// Activations: a warp's slice of x, as operands in registers or in shared memory.
#include <type_traits>

#include "cuda/device/digits.cuh"
#include "cuda/ops/linear/packed/config.cuh"
#include "cuda/ops/linear/packed/fragment.cuh"
#include "cuda/ops/linear/packed/ring.cuh"

namespace cf::cuda {

/// The order in which a warp multiplies its slice's chunks. The sums of several tokens are scaled after every chunk, or
/// after every pair of chunks where a group is a whole number of pairs. A slice whose first chunk is odd begins in the
/// middle of a pair; that chunk then comes last, alone.
template <GptqConfig C>
struct GptqChunkOrder {
  bool in_pairs;
  int rotation, last;

  __device__ GptqChunkOrder(const GptqPlan& plan, const GptqSlice& slice)
      : in_pairs(C.in_quads() || (!C.one_token() && plan.halves_a_group % 4 == 0 &&
                                  (slice.count == C.chunks || (slice.count + 1 == C.chunks && slice.first % 2 == 0)))),
        rotation(in_pairs && !C.in_quads() ? slice.first & 1 : 0),
        last(rotation ? 0 : min(slice.count, C.chunks) - 1) {}

  /// The slice's chunk that is multiplied i-th.
  __device__ int operator()(int i) const {
    if (C.in_quads()) return i;
    return !C.one_token() && i + 1 == C.chunks ? last : i + rotation;
  }
  /// Whether the sums are scaled after the i-th chunk.
  __device__ static bool ends_sum(bool pairs, int i) { return !pairs || i % 2 == 1 || i + 1 == C.chunks; }
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

/// Returns a or b. Both are passed by value: the compiler would turn a choice between variables into a choice between
/// their addresses, and put the variables into local memory.
__device__ inline uint4 choose(bool first, uint4 a, uint4 b) { return first ? a : b; }

/// One token's slice of x in registers, as digits: x[k] = factor * v[k]. The error is at most 1 / 65024 of the slice's
/// largest |x|, less than the rounding of that element to a 16-bit dtype. A product has eight columns, a pair for each
/// group of weights of the slice: one column has the low digits of the group's activations, the other one the high
/// digits, and both have zeros for the other groups' chunks. So a group's sums are multiplied by its scale once, after
/// the last chunk. The eight columns serve four groups. A slice's fifth group is one chunk: it takes the first pair,
/// once the sums of the first four groups have been multiplied by their scales. Lanes 4n to 4n + 3 hold column n.
///
/// packed/fragment.cuh makes 16-bit operands of codes, which need no digits. That takes 0.6 instructions a weight, and
/// digits take 0.25.
template <class T, GptqConfig C>
class GptqOneTokenX {
 public:
  __device__ GptqOneTokenX(const GptqMatrix& m, const GptqPlan& plan, const GptqWarp& warp, const GptqChunkOrder<C>&,
                           const GptqSmem& at, int /*tokens*/)
      : m_(m), warp_(warp), at_(at) {
    const int group_chunks = plan.halves_a_group / 2, own = warp.slice.first_group + warp.g / 2;
    const auto chunks_of = [&](int group) {
      const int from = group * group_chunks - warp.slice.first, to = min(from + group_chunks, warp.slice.count);
      return to > max(from, 0) ? (1u << to) - (1u << max(from, 0)) : 0;
    };
    chunks_ = chunks_of(own) | chunks_of(own + kGptqOneTokenGroups);
  }

  /// Loads the slice, up to two vectors a lane. x(0) points to the token's activations.
  template <class X>
  __device__ void load(X x) {
    load_slice(x(0), loaded_);
  }
  /// Loads the norm's gamma for the slice's columns.
  __device__ void load_gain(const T* gain) { load_slice(gain, gain_); }

  /// Normalises what load() has loaded, and rounds to T. norm(x, gain) is an element of the norm.
  template <class Norm>
  __device__ void normalise(const Norm& norm) {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
      float x[kVec], gain[kVec];
      unpack(loaded_[i], x, T{});
      unpack(gain_[i], gain, T{});
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[e] = norm(x[e], gain[e]);
      loaded_[i] = pack_vec<T>(x);
    }
  }

  /// Makes the digits. The warp's lanes exchange them in shared memory, at digit_offset().
  __device__ void prepare() {
    const float inverse = make_factor();
    char* const bytes = reinterpret_cast<char*>(at_.x);
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
      const int v = vector(i);
      if (v >= warp_.slice.count * kChunkVectors) continue;
      float x[kVec];
      unpack(loaded_[i], x, T{});
      unsigned whole[kVec];  // a float of this size holds an integer in its lowest bits
#pragma unroll
      for (int e = 0; e < kVec; ++e) whole[e] = __float_as_uint(fmaf(x[e], inverse, 0x1.8p23f + 128));
      digit_words(whole).store(bytes + digit_offset(v));
    }
    __syncwarp();
    const char* const from = bytes + warp_.g % 2 * (kGptqDigitBytes / 2) + warp_.t * 16;
    for_each_chunk([&](int c) {
      x_[c] = chunks_ >> c & 1 ? *reinterpret_cast<const uint4*>(from + c * kGptqDigitBytes) : uint4{};
    });
  }
  /// Adds up the integers of each group by products with ones. These products run beside those of the first tile.
  __device__ void sum_all() {
    constexpr unsigned ones = 0x01010101u;
    constexpr int fifth = kGptqOneTokenGroups;
    int first[4] = {}, second[4] = {}, of_fifth[4] = {};
    for_each_chunk([&](int c) {
      mma_bytes(c == fifth ? of_fifth : first, ones, ones, ones, ones, x_[c].x, x_[c].y);
      mma_bytes(c == fifth ? of_fifth : second, ones, ones, ones, ones, x_[c].z, x_[c].w);
    });
    of_fifth_ = 16 * float(of_fifth[0] + 256 * of_fifth[1]);
    sums_ = 16 * float(first[0] + second[0] + 256 * (first[1] + second[1])) + (has_fifth_group() ? 0 : of_fifth_);
  }

  /// Calls f(c) for the chunks that are multiplied: those of the slice, and always the first four. A product with the
  /// zeros of a chunk that a short slice lacks is cheaper than a branch.
  template <class F>
  __device__ void for_each_chunk(F f) const {
#pragma unroll
    for (int c = 0; c < C.chunks; ++c) {
      if (c >= kGptqOneTokenGroups && c >= warp_.slice.count) break;
      f(c);
    }
  }
  /// The digits of a chunk.
  __device__ const uint4& operator()(int chunk) const { return x_[chunk]; }
  /// Whether the slice has a fifth group, which is its fifth and last chunk.
  __device__ bool has_fifth_group() const { return warp_.slice.groups > kGptqOneTokenGroups; }
  /// Sixteen times the sum of v over group t of the slice.
  __device__ float sums() const { return sums_; }
  /// The same of the fifth group; 0 in lanes with t > 0.
  __device__ float sums_of_fifth() const { return of_fifth_; }
  /// A sixteenth of the factor, as the sums are sixteen times too large. NaN where an element of the slice is infinite
  /// or NaN.
  __device__ float factor() const { return factor_; }

 private:
  static constexpr int kChunkVectors = kGptqColumns / kVec;
  static constexpr int kLaneVectors = (C.chunks * kChunkVectors + 31) / 32;

  /// The vector of the slice that the lane loads i-th.
  __device__ int vector(int i) const { return warp_.lane + 32 * i; }

  /// Loads the elements of a row that belong to the slice's columns.
  __device__ void load_slice(const T* row, uint4 (&to)[kLaneVectors]) const {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
      const int v = vector(i), column = warp_.slice.first * kGptqColumns + v * kVec;
      to[i] = {};
      if (v >= warp_.slice.count * kChunkVectors) continue;
      if (m_.order)
        to[i] = load_columns<true>(m_, row, column);
      else if (column < m_.in)
        to[i] = load_columns<false>(m_, row, column);
    }
  }

  /// Makes `factor` and returns 1 / factor, by which activations become integers. If all elements of the slice are
  /// multiplied by 2^n, the factor is multiplied by exactly 2^n, and the digits stay the same.
  __device__ float make_factor() {
    std::uint32_t most = 0;  // as unsigned numbers, the bits of absolute values have the order of the values
#pragma unroll
    for (const uint4& v : loaded_) {
      const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) most = __vmaxu2(most, pairs[i] & 0x7fff7fff);
    }
    most = __reduce_max_sync(~0u, max(most >> 16, most & 0xffff));
    const std::uint32_t bits = __float_as_uint(unpack(most, T{}).x);
    // The exponent is limited so that the factor and its inverse are normal numbers.
    const std::uint32_t exponent = min(max(bits >> 23, 19u), 254u);
    const float significand = __uint_as_float((bits & 0x7fffff) | 0x3f800000);
    constexpr float largest = kLargestDigits / 0x1p14f;
    factor_ = bits < 0x7f800000 ? significand * (1 / largest) * __uint_as_float(exponent - 18 << 23) : NAN;
    return reciprocal_approximate(significand) * largest * __uint_as_float(268 - exponent << 23);
  }

  const GptqMatrix& m_;
  const GptqWarp& warp_;
  const GptqSmem& at_;
  uint4 loaded_[kLaneVectors], gain_[kLaneVectors], x_[C.chunks];
  float factor_, sums_, of_fifth_;
  std::uint32_t chunks_;  // bit c says that chunk c is of a group of the lane's column
};

/// Two to 32 tokens in registers. A product has eight columns, each of which takes one token of an octet. Lanes 4n to
/// 4n + 3 hold the activations of column n, two vectors of each chunk. The sums of columns without a token are never
/// read.
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
    // A slice that lacks one chunk at most, all of them whole, loads every vector unconditionally. In the place of a
    // chunk that it lacks it loads another chunk again, which nothing reads.
    const bool is_whole = slice.count + 1 >= C.chunks && (slice.first + slice.count) * kGptqColumns <= m_.in;
    if (!C.in_quads() && (m_.order || !is_whole)) [[unlikely]] {
#pragma unroll 1
      for (int at = 0; at < 2 * octets * C.chunks; ++at) {
        const int c = at / (2 * octets), o = at / 2 % octets, i = at % 2;
        const T* const row = x(token_of_vector(o, i));
        uint4 v{};
        if (c < slice.count) {
          if (m_.order)
            v = load_columns<true>(m_, row, column_of(c, i));
          else if (column_of(c, i) < m_.in)
            v = load_columns<false>(m_, row, column_of(c, i));
        }
#pragma unroll
        for (int to = 0; to < 2 * octets * C.chunks; ++to) {
          uint4& vector = x_[to / (2 * octets)][to / 2 % octets][to % 2];
          vector = choose(to == at, v, vector);
        }
      }
    } else {
#pragma unroll
      for (int o = 0; o < octets; ++o) {
        const T* const rows[] = {x(token_of_vector(o, 0)), x(token_of_vector(o, 1))};
#pragma unroll
        for (int c = 0; c < C.chunks; ++c)
#pragma unroll
          for (int i = 0; i < 2; ++i) x_[c][o][i] = load_columns<false>(m_, rows[i], column_of(c, i));
      }
    }
  }

  /// Puts every vector at its product column, and adds up the activations.
  __device__ void prepare() {
    __syncwarp();
    if (C.in_quads() || order_.in_pairs)
      prepare_chunks(std::true_type{});
    else
      prepare_chunks(std::false_type{});
  }

  /// The activations of octet o in a half of the chunk that is multiplied i-th.
  __device__ const uint4& operator()(int i, int half, int o) const { return x_[i][o][half]; }
  /// Sums of the activations whose products are scaled together after the i-th chunk.
  __device__ const float2& sums(int i, int o) const { return sums_[i][o]; }

 private:
  static constexpr int octets = C.octets();
  /// Whether lanes load lines for two columns and exchange halves. They do where x lies in device memory.
  static constexpr bool by_lines = !C.near_x;

  __device__ int token_of_vector(int o, int i) const {
    return min(8 * o + (by_lines ? warp_.lane / 8 + 4 * i : gptq_token_of_column(warp_.g)), tokens_ - 1);
  }
  /// The first column of vector i of the slice's first chunk.
  __device__ int column(int i) const {
    return warp_.slice.first * kGptqColumns + (by_lines ? warp_.lane % 8 * kVec : warp_.t * kVec + i * 32);
  }

  template <class Pairs>
  __device__ void prepare_chunks(Pairs) {
#pragma unroll
    for (int o = 0; o < octets; ++o) {
      float ones[4] = {};
#pragma unroll
      for (int c = 0; c < C.chunks; ++c) {
        auto& [first, second] = x_[c][o];
        if constexpr (by_lines) {
          const bool is_odd = warp_.g % 2;
          const uint4 other = exchange(choose(is_odd, first, second), 4);
          first = choose(is_odd, other, first);
          second = choose(is_odd, second, other);
        }
        add_up<T>(first, ones);
        add_up<T>(second, ones);
        if (!GptqChunkOrder<C>::ends_sum(Pairs::value, c)) continue;
        sums_[c][o] = sums_of_x(ones, warp_.t);
#pragma unroll
        for (float& sum : ones) sum = 0;
      }
    }
  }

  const GptqMatrix& m_;
  const GptqWarp& warp_;
  const GptqChunkOrder<C>& order_;
  const int tokens_;
  uint4 x_[C.chunks][octets][2];
  float2 sums_[C.chunks][octets];
};

/// Up to sixteen tokens in shared memory: [part][token], kGptqTokenBytes apart. A product's eight columns are those of
/// an octet of tokens.
template <class T, GptqConfig C>
class GptqSharedX {
 public:
  static constexpr int vectors = kGptqTokenBytes / 16;  // the distance of two tokens, in units of 16 bytes

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
