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

/// Rows of words that a tile has. With kColumns columns they take 16 KiB, which stay in the first cache.
inline constexpr std::int64_t kGptqTileWords = 16;

/// Adds the words first .. last - 1 of Isa::lanes columns from `column` on to y.
template <class Isa, int bits, int Tokens>
void gptq_tile(const GptqColumns& c, std::int64_t column, std::int64_t first, std::int64_t last, const float* x,
               std::int64_t in, float* y) {
  using V = typename Isa::V;
  constexpr int codes = 32 / bits, chains = 2;  // two sums a token hide half of an addition's latency
  V sum[Tokens][chains], zero = Isa::zero(), scale = Isa::zero();
  for (int t = 0; t < Tokens; ++t)
    for (V& s : sum[t]) s = Isa::zero();
  std::int64_t group = -1;
  for (std::int64_t word = first; word < last; ++word) {
    const std::int32_t* const from = c.words + word * c.word_stride + column;
    // The next tile's words: each row lies on another page, where no hardware looks ahead.
    __builtin_prefetch(from + kGptqTileWords * c.word_stride);
    const typename Isa::Words words = Isa::load_words(from);
#pragma GCC unroll 8  // the sums stay in registers, and shifts are constants
    for (int i = 0; i < codes; ++i) {
      const std::int64_t k = word * codes + i;
      if (c.g_idx[k] != group) {
        group = c.g_idx[k];
        zero = Isa::load(c.zeros + group * GptqColumns::kColumns + column);
        scale = Isa::load(c.scales + group * GptqColumns::kColumns + column);
      }
      // The difference and the product are exact in float32, so w is the W that GptqWeight defines.
      const V w = Isa::mul(Isa::sub(Isa::template code<bits>(words, i), zero), scale);
      for (int t = 0; t < Tokens; ++t)
        sum[t][i % chains] = Isa::fma(w, Isa::broadcast(x[t * in + k]), sum[t][i % chains]);
    }
  }
  for (int t = 0; t < Tokens; ++t) {
    float* to = y + t * GptqColumns::kColumns + column;
    Isa::store(to, Isa::add(Isa::load(to), Isa::add(sum[t][0], sum[t][1])));
  }
}

template <class Isa, int bits>
void gptq_columns_of(const GptqColumns& c, const float* x, std::int64_t in, std::int64_t tokens, float* y) {
  for (std::int64_t i = 0; i < tokens * GptqColumns::kColumns; ++i) y[i] = 0;
  const std::int64_t words = in * bits / 32;
  for (std::int64_t first = 0; first < words; first += kGptqTileWords) {
    const std::int64_t last = first + kGptqTileWords < words ? first + kGptqTileWords : words;
    for (std::int64_t column = 0; column < GptqColumns::kColumns; column += Isa::lanes) {
      std::int64_t t = 0;
      for (; t + 4 <= tokens; t += 4)
        gptq_tile<Isa, bits, 4>(c, column, first, last, x + t * in, in, y + t * GptqColumns::kColumns);
      for (; t < tokens; ++t)
        gptq_tile<Isa, bits, 1>(c, column, first, last, x + t * in, in, y + t * GptqColumns::kColumns);
    }
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
