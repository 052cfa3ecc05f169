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
          .product = product<Isa>,
          .axpy = axpy<Isa>,
          .widen_f16 = widen_f16<Isa>};
}

}  // namespace cf::cpu_ref
