#pragma once
#include "core/fp8.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"

namespace cf::cpu_ref {

/// W of a quantised matrix as GptqWeight defines it, (out, in) in float64 or float32. Both are exact: a scale has 11
/// significant bits, a difference of two codes at most 9. The weight's tensors fit each other, and every g_idx is a
/// group.
Tensor dequantise(const GptqWeight& w, DType dtype);

/// Rows first .. first + rows - 1 of W, one after the other.
template <class Real>
void dequantise_rows(const GptqWeight& w, std::int64_t first, std::int64_t rows, Real* to);

/// W of an fp8 matrix as Fp8Weight defines it, (out, in) in float64 or float32: exact in float64, rounded once in
/// float32.
Tensor dequantise(const Fp8Weight& w, DType dtype);

/// Rows first .. first + rows - 1 of W, one after the other.
template <class Real>
void dequantise_rows(const Fp8Weight& w, std::int64_t first, std::int64_t rows, Real* to);

}  // namespace cf::cpu_ref
