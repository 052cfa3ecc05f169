#pragma once
// The loops of Kernels, written once over a set of vector operations `Isa`. Each kernels_<isa>.cpp includes this with
// its own compiler flags and an Isa in an anonymous namespace, so that the linker merges no code of different sets.
#include "cpu_ref/simd/kernels.hpp"

// So does Eigen: each file names a namespace of its own for it, CF_EIGEN.
#define Eigen CF_EIGEN
#include <Eigen/Core>

namespace cf::cpu_ref {

template <class Isa, int Tokens, class W>
void dot_tokens(const W* w, const float* x, std::int64_t n, std::int64_t x_stride, float* y) {
  using V = typename Isa::V;
  constexpr int unroll = 4;  // independent sums: enough to hide the latency of the additions
  // Weights come from memory and the hardware's prefetchers stop at page ends: a Pythia-2.8B layer reads at 71% of the
  // plain streaming read without this, at 85-90% with 2 to 4 KiB ahead (2 cores of an EPYC 9005). Past the matrix's end
  // a prefetch does nothing.
  constexpr int prefetch_bytes = 4096;
  V sum[Tokens][unroll];
  for (int t = 0; t < Tokens; ++t)
    for (int u = 0; u < unroll; ++u) sum[t][u] = Isa::zero();
  std::int64_t k = 0;
  for (; k + unroll * Isa::lanes <= n; k += unroll * Isa::lanes)
    for (int u = 0; u < unroll; ++u) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + k + u * Isa::lanes) + prefetch_bytes);
      const V wv = Isa::load(w + k + u * Isa::lanes);
      for (int t = 0; t < Tokens; ++t)
        sum[t][u] = Isa::fma(wv, Isa::load(x + t * x_stride + k + u * Isa::lanes), sum[t][u]);
    }
  for (; k + Isa::lanes <= n; k += Isa::lanes) {
    const V wv = Isa::load(w + k);
    for (int t = 0; t < Tokens; ++t) sum[t][0] = Isa::fma(wv, Isa::load(x + t * x_stride + k), sum[t][0]);
  }
  for (int t = 0; t < Tokens; ++t) {
    float s = Isa::sum(Isa::add(Isa::add(sum[t][0], sum[t][1]), Isa::add(sum[t][2], sum[t][3])));
    for (std::int64_t i = k; i < n; ++i) s += Isa::widen(w[i]) * x[t * x_stride + i];
    y[t] = s;
  }
}

template <class Isa, class W>
void dot(const W* w, const float* x, std::int64_t n, std::int64_t x_stride, std::int64_t tokens, float* y) {
  std::int64_t t = 0;
  for (; t + 2 <= tokens; t += 2) dot_tokens<Isa, 2>(w, x + t * x_stride, n, x_stride, y + t);
  if (t < tokens) dot_tokens<Isa, 1>(w, x + t * x_stride, n, x_stride, y + t);
}

/// Rows of words that a tile has. In most matrices the rows lie a multiple of 4 KiB apart, so that a column's words
/// share a set of the L1 cache, which has 8 to 12 ways.
inline constexpr std::int64_t kGptqTileWords = 8;

/// The codes of a word that fit the 23 bits of a float's fraction become floats where they stand, in places. The word's
/// other codes do so after a shift of the word by all places. Code i has place i % kGptqPlaces.
template <int bits>
inline constexpr int kGptqPlaces = 23 / bits;

/// The value of a code of 1 in its place. Inputs are divided by it. It is a power of two, so that products stay exact.
template <int bits>
constexpr float place_value(int place) {
  return float(1 << (bits * place));
}

/// For each of `lanes` codes that stand side by side: its word's number, and the code's first bit in that word.
template <int lanes, int bits>
struct PackedCodes {
  static_assert(lanes * bits % 32 == 0, "the first code is a word's first");
  static constexpr int bytes = lanes * bits / 8;
  alignas(64) std::int32_t word[lanes] = {};
  alignas(64) std::int32_t shift[lanes] = {};
  constexpr PackedCodes() {
    for (int i = 0; i < lanes; ++i) word[i] = i * bits / 32, shift[i] = i * bits % 32;
  }
};

/// 2^23. The fraction of the float kRaise + n is n, so that an `and` and an `or` make a code a float.
inline constexpr float kRaise = 8388608;

/// The sums of Isa::lanes columns of a tile for Tokens tokens.
template <class Isa, int bits, int Tokens>
struct GptqTile {
  using V = typename Isa::V;
  using Words = typename Isa::Words;
  static constexpr int codes = 32 / bits, places = kGptqPlaces<bits>;
  using Inputs = float[kGptqTileWords * codes];

  const GptqColumns& c;
  std::int64_t column, first_word;
  const Inputs* x;  // (Tokens): x[k] / place_value of k's code
  V total[Tokens];

  V scale(std::int32_t group) const { return Isa::load(c.scales + group * c.scale_stride + column); }
  V zero(std::int32_t group) const {
    const V codes_along = Isa::template packed_codes<bits>(c.zeros + group * c.zero_stride, column);
    return Isa::add(codes_along, Isa::broadcast(c.zero_offset));
  }
  static V raised_zero(V zero, int place) {
    return Isa::fma(zero, Isa::broadcast(place_value<bits>(place)), Isa::broadcast(kRaise));
  }
  Words load_words(std::int64_t word) const {
    const std::int32_t* const from = c.words + word * c.word_stride + column;
    // The words two tiles ahead, into L2: in L1 they would displace this tile's words.
    __builtin_prefetch(from + 2 * kGptqTileWords * c.word_stride, 0, 2);
    return Isa::load_words(from);
  }
  /// Calls f(i, place, kRaise + code * place_value) for each code i of a word.
  template <class F>
  static void for_each_code(Words words, F f) {
#pragma GCC unroll 8  // the sums stay in registers, and places are constants
    for (int i = 0; i < codes; ++i) {
      const int place = i % places;
      if (i > 0 && place == 0) words = Isa::template shift_right<bits * places>(words);
      f(i, place, Isa::raised(words, ((1 << bits) - 1) << (bits * place), kRaise));
    }
  }

  /// Adds words of one group, whose scale multiplies their sum.
  void add_group(std::int64_t first, std::int64_t last, std::int32_t group) {
    constexpr int chains = 4;  // independent sums hide an addition's latency
    V sum[Tokens][chains], zeros[places];
    for (int place = 0; place < places; ++place) zeros[place] = raised_zero(zero(group), place);
    for (int t = 0; t < Tokens; ++t)
      for (V& s : sum[t]) s = Isa::zero();
    for (std::int64_t word = first; word < last; ++word)
      for_each_code(load_words(word), [&, k = (word - first_word) * codes](int i, int place, V code) {
        const V w = Isa::sub(code, zeros[place]);
        for (int t = 0; t < Tokens; ++t)
          sum[t][i % chains] = Isa::fma(w, Isa::broadcast(x[t][k + i]), sum[t][i % chains]);
      });
    const V factor = scale(group);
    for (int t = 0; t < Tokens; ++t) {
      const V* const s = sum[t];
      total[t] = Isa::fma(Isa::add(Isa::add(s[0], s[1]), Isa::add(s[2], s[3])), factor, total[t]);
    }
  }

  /// Adds a word whose codes have several groups.
  void add_mixed(std::int64_t word) {
    for_each_code(load_words(word), [&, k = (word - first_word) * codes](int i, int place, V code) {
      const std::int32_t group = c.g_idx[word * codes + i];
      const V w = Isa::mul(Isa::sub(code, raised_zero(zero(group), place)), scale(group));
      for (int t = 0; t < Tokens; ++t) total[t] = Isa::fma(w, Isa::broadcast(x[t][k + i]), total[t]);
    });
  }
};

/// Adds the products of the words first .. last - 1, a tile, with Tokens tokens to y. A token's sums have the same
/// order for all Tokens.
template <class Isa, int bits, int Tokens>
void gptq_tile(const GptqColumns& c, std::int64_t first, std::int64_t last, const float* x, std::int64_t in, float* y) {
  using Tile = GptqTile<Isa, bits, Tokens>;
  typename Tile::Inputs placed[Tokens];
  for (int t = 0; t < Tokens; ++t)
    for (std::int64_t k = 0; k < (last - first) * Tile::codes; ++k)
      placed[t][k] = x[t * in + first * Tile::codes + k] / place_value<bits>(int(k % Tile::codes) % Tile::places);
  for (std::int64_t column = 0; column < c.columns; column += Isa::lanes) {
    Tile tile{c, column, first, placed, {}};
    for (std::int64_t word = first, end; word < last; word = end) {
      const std::int32_t group = c.word_groups[word];
      end = word + 1;
      if (group == GptqColumns::kMixed) {
        tile.add_mixed(word);
        continue;
      }
      while (end < last && c.word_groups[end] == group) ++end;
      tile.add_group(word, end, group);
    }
    for (int t = 0; t < Tokens; ++t) {
      float* const to = y + t * c.columns + column;
      Isa::store(to, Isa::add(Isa::load(to), tile.total[t]));
    }
  }
}

template <class Isa, int bits>
void gptq_columns_of(const GptqColumns& c, const float* x, std::int64_t in, std::int64_t tokens, float* y) {
  constexpr int some = Isa::registers / 8;  // tokens whose sums, four each, take half of the registers
  for (std::int64_t i = 0; i < tokens * c.columns; ++i) y[i] = 0;
  const std::int64_t words = in * bits / 32;
  for (std::int64_t first = 0; first < words; first += kGptqTileWords) {
    const std::int64_t last = first + kGptqTileWords < words ? first + kGptqTileWords : words;
    std::int64_t t = 0;
    for (; t + some <= tokens; t += some) gptq_tile<Isa, bits, some>(c, first, last, x + t * in, in, y + t * c.columns);
    for (; t < tokens; ++t) gptq_tile<Isa, bits, 1>(c, first, last, x + t * in, in, y + t * c.columns);
  }
}

template <class Isa>
void gptq_columns(const GptqColumns& c, const float* x, std::int64_t in, std::int64_t tokens, float* y) {
  if (c.bits == 4)
    gptq_columns_of<Isa, 4>(c, x, in, tokens, y);
  else
    gptq_columns_of<Isa, 8>(c, x, in, tokens, y);
}

template <class Isa>
void axpy(float a, const float* x, float* y, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + Isa::lanes <= n; i += Isa::lanes)
    Isa::store(y + i, Isa::fma(Isa::broadcast(a), Isa::load(x + i), Isa::load(y + i)));
  for (; i < n; ++i) y[i] += a * x[i];
}

template <class Isa>
void widen_f16(const f16* from, float* to, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + Isa::lanes <= n; i += Isa::lanes) Isa::store(to + i, Isa::load(from + i));
  for (; i < n; ++i) to[i] = Isa::widen(from[i]);
}

/// Isa's file compiles Eigen for the set.
template <class Isa>
void product(const float* w, std::int64_t rows, const float* x, std::int64_t tokens, std::int64_t n, float* y) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Eigen::Map<Matrix>(y, rows, tokens).noalias() =
      Eigen::Map<const Matrix>(w, rows, n) * Eigen::Map<const Matrix>(x, tokens, n).transpose();
}

template <class Isa>
constexpr Kernels make_kernels() {
  return {.name = Isa::name,
          .dot_f16 = dot<Isa, f16>,
          .dot_bf16 = dot<Isa, bf16>,
          .dot_f32 = dot<Isa, float>,
          .gptq_columns = gptq_columns<Isa>,
          .product = product<Isa>,
          .axpy = axpy<Isa>,
          .widen_f16 = widen_f16<Isa>};
}

}  // namespace cf::cpu_ref
