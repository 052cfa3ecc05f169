#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"

namespace cf::cpu_ref {

/// A block of neighbouring columns of a GPTQ matrix. A column makes one output. The tensors are those of GptqWeight,
/// from the block's first column on.
struct GptqColumns {
  static constexpr std::int64_t kMultiple = 16;  // a block's first column and its columns are multiples
  static constexpr std::int32_t kMixed = -1;

  std::int64_t columns;
  int bits;
  float zero_offset;
  const std::int32_t* words;  // (in * bits / 32, columns), the rows word_stride apart
  std::int64_t word_stride;
  const std::int32_t* zeros;  // (groups, columns * bits / 32), the rows zero_stride apart
  std::int64_t zero_stride;
  const f16* scales;  // (groups, columns), the rows scale_stride apart
  std::int64_t scale_stride;
  const std::int32_t* g_idx;        // (in)
  const std::int32_t* word_groups;  // (in * bits / 32): the group of a row's codes, or kMixed where they have several
};

/// The inner loops, compiled for several sets of vector instructions. Private to cpu_ref.
struct Kernels {
  const char* name;

  /// y[t] = sum_k w[k] * x[t * x_stride + k] in float32, for t < tokens. A token's bits do not depend on the others.
  void (*dot_f16)(const f16* w, const float* x, std::int64_t n, std::int64_t x_stride, std::int64_t tokens, float* y);
  void (*dot_bf16)(const bf16* w, const float* x, std::int64_t n, std::int64_t x_stride, std::int64_t tokens, float* y);
  void (*dot_f32)(const float* w, const float* x, std::int64_t n, std::int64_t x_stride, std::int64_t tokens, float* y);

  /// y[t * columns + n] = sum_k W[n,k] * x[t * in + k] in float32, for the block's columns n and for t < tokens. A
  /// token's bits do not depend on the others.
  void (*gptq_columns)(const GptqColumns& columns, const float* x, std::int64_t in, std::int64_t tokens, float* y);

  /// y[r * tokens + t] = sum_k w[r * n + k] * x[t * n + k] in float32, for r < rows and t < tokens. With many
  /// tokens this is faster than a dot() for each row.
  void (*product)(const float* w, std::int64_t rows, const float* x, std::int64_t tokens, std::int64_t n, float* y);

  /// y[i] += a * x[i]
  void (*axpy)(float a, const float* x, float* y, std::int64_t n);

  /// Exact widening.
  void (*widen_f16)(const f16* from, float* to, std::int64_t n);
};

/// The best set that this processor runs.
const Kernels& kernels();

/// All sets that this processor runs, best first. The tests compare each with the portable one.
const Kernels* const* all_kernels(std::size_t* count);

extern const Kernels kPortableKernels;
#ifdef CF_X86
extern const Kernels kAvx2Kernels;    // AVX2, FMA, F16C
extern const Kernels kAvx512Kernels;  // AVX-512 F
#endif

}  // namespace cf::cpu_ref
