#pragma once
// RMSNorm of one row, for the ops that have it.
#include "core/contract.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {

template <class Real>
Real inverse_rms(const Eigen::Ref<const Array<Real>>& x, double eps) {
  return 1 / std::sqrt(x.square().mean() + Real(eps));
}

/// The condition of rows of `size` elements. No sum cancels: squares are positive. The root halves the relative error
/// of the sum of squares, of its division by size and of the sum with eps. The root, its reciprocal and the products
/// with x and gamma round once each. The budget multiplies a condition by sqrt(size), so these five roundings are
/// divided by that.
inline Condition rms_condition(std::int64_t size) {
  const double c = std::max(1.0, 0.5 + 5 / std::sqrt(double(size)));
  return {c, c};
}

}  // namespace cf::cpu_ref
