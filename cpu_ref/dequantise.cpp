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

/// The zero of output n in group g, with its offset.
std::int32_t gptq_zero(const GptqWeight& w, std::int64_t group, std::int64_t n) {
  return code(w.qzeros.data + group * w.qzeros.shape[1], 1, n, w.bits) + w.zero_offset;
}

}  // namespace

template <class Real>
void dequantise_rows(const GptqWeight& w, std::int64_t first, std::int64_t rows, Real* to) {
  const std::int64_t in = w.g_idx.shape[0], out = w.scales.shape[1], groups = w.scales.shape[0];
  const std::int64_t per_word = w.codes_per_word();
  const std::uint32_t mask = (1u << w.bits) - 1;
  // The words of one row lie `out` words apart, each in a cache line of its own. 16 rows use the whole line.
  constexpr std::int64_t most_rows = 16;
  std::vector<Real> scale(std::size_t(groups * most_rows));  // (groups, most_rows)
  std::vector<std::int32_t> zero(scale.size());
  for (std::int64_t begin = first; begin < first + rows; begin += most_rows) {
    const std::int64_t some = std::min(most_rows, first + rows - begin);
    for (std::int64_t g = 0; g < groups; ++g)
      for (std::int64_t r = 0; r < some; ++r) {
        scale[std::size_t(g * most_rows + r)] = widen<Real>(w.scales.data[g * out + begin + r]);
        zero[std::size_t(g * most_rows + r)] = gptq_zero(w, g, begin + r);
      }
    for (std::int64_t row = 0; row < in / per_word; ++row)
      for (std::int64_t r = 0; r < some; ++r) {
        auto word = std::uint32_t(w.qweight.data[row * out + begin + r]);
        Real* const codes = to + (begin - first + r) * in + row * per_word;
        for (std::int64_t i = 0; i < per_word; ++i, word >>= w.bits) {
          const auto g = std::size_t(w.g_idx.data[row * per_word + i] * most_rows + r);
          codes[i] = scale[g] * Real(std::int32_t(word & mask) - zero[g]);
        }
      }
  }
}

template void dequantise_rows(const GptqWeight&, std::int64_t, std::int64_t, float*);
template void dequantise_rows(const GptqWeight&, std::int64_t, std::int64_t, double*);

template <class Real>
void dequantise_rows(const Fp8Weight& w, std::int64_t first, std::int64_t rows, Real* to) {
  const std::int64_t groups = w.groups();
  for (std::int64_t n = first; n < first + rows; ++n)
    for (std::int64_t g = 0; g < groups; ++g) {
      const Real scale = w.scales[n * groups + g];
      const std::int64_t end = std::min(w.in, (g + 1) * w.group_size);
      for (std::int64_t k = g * w.group_size; k < end; ++k) *to++ = widen<Real>(w.codes[n * w.in + k]) * scale;
    }
}

template void dequantise_rows(const Fp8Weight&, std::int64_t, std::int64_t, float*);
template void dequantise_rows(const Fp8Weight&, std::int64_t, std::int64_t, double*);

namespace {

template <class W>
Tensor dequantise_all(const W& w, std::int64_t out, std::int64_t in, DType dtype) {
  Tensor t(dtype, {out, in});
  if (dtype == DType::f64)
    dequantise_rows(w, 0, out, t.as<double>());
  else
    dequantise_rows(w, 0, out, t.as<float>());
  return t;
}

}  // namespace

Tensor dequantise(const GptqWeight& w, DType dtype) {
  return dequantise_all(w, w.scales.shape[1], w.g_idx.shape[0], dtype);
}
Tensor dequantise(const Fp8Weight& w, DType dtype) { return dequantise_all(w, w.out, w.in, dtype); }

}  // namespace cf::cpu_ref
