#pragma once
#include <cmath>
#include <numbers>

namespace cf::cpu_ref {

/// x/2 (1 + erf(x / sqrt 2)), through erfc, which keeps its digits where x is far below zero.
template <class Real>
Real gelu_erf(Real x) {
  return x / 2 * std::erfc(-x / std::numbers::sqrt2_v<Real>);
}

/// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
template <class Real>
Real gelu_tanh(Real x) {
  const Real inner = Real(0.79788456080286535588) * (x + Real(0.044715) * x * x * x);
  return x / 2 * (1 + std::tanh(inner));
}

/// x / (1 + exp(-x)), which is 0 where exp(-x) is infinite.
template <class Real>
Real silu(Real x) {
  return x / (1 + std::exp(-x));
}

}  // namespace cf::cpu_ref
