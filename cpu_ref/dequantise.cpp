#include "cpu_ref/dequantise.hpp"

#include <algorithm>
#include <vector>

namespace cf::cpu_ref {
namespace {

/// Code i of a run of packed words that are `stride` apart.
std::int32_t code(const std::int32_t* words, std::int64_t stride, std::int64_t i, int bits) {
  const std::int64_t per_word = 32 / bits;
  const auto word = std::uint32_t(words[i / per_word * stride]);
  return std::int32_t(word >> (i % per_word * bits) & ((1u << bits) - 1));
}

}  // namespace

template <class Real>
void dequantise_rows(const GptqWeight& w, std::int64_t first, std::int64_t rows, Real* to) {
  const std::int64_t in = w.g_idx.shape[0], out = w.scales.shape[1], groups = w.scales.shape[0];
  // A row's scales and zeros, by group.
  std::vector<Real> scale(static_cast<std::size_t>(groups));
  std::vector<std::int32_t> zero(static_cast<std::size_t>(groups));
  for (std::int64_t n = first; n < first + rows; ++n) {
    for (std::int64_t g = 0; g < groups; ++g) {
      scale[std::size_t(g)] = widen<Real>(w.scales.data[g * out + n]);
      zero[std::size_t(g)] = code(w.qzeros.data + g * w.qzeros.shape[1], 1, n, w.bits) + w.zero_offset;
    }
    Real* row = to + (n - first) * in;
    for (std::int64_t k = 0; k < in; ++k) {
      const auto g = std::size_t(w.g_idx.data[k]);
      row[k] = scale[g] * Real(code(w.qweight.data + n, out, k, w.bits) - zero[g]);
    }
  }
}

template void dequantise_rows(const GptqWeight&, std::int64_t, std::int64_t, float*);
template void dequantise_rows(const GptqWeight&, std::int64_t, std::int64_t, double*);

Tensor dequantise(const GptqWeight& w, DType dtype) {
  const std::int64_t in = w.g_idx.shape[0], out = w.scales.shape[1];
  Tensor t(dtype, {out, in});
  if (dtype == DType::f64)
    dequantise_rows(w, 0, out, t.as<double>());
  else
    dequantise_rows(w, 0, out, t.as<float>());
  return t;
}

}  // namespace cf::cpu_ref
