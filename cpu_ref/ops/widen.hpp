#pragma once
#include <cstdint>

#include "core/dtype.hpp"

namespace cf::cpu_ref {

/// to[i] = element first + i of a stored tensor, widened exactly. Real is float or double; from f64 to float it rounds.
template <class Real>
void widen_row(const void* data, DType dtype, std::int64_t first, std::int64_t n, Real* to);

}  // namespace cf::cpu_ref
