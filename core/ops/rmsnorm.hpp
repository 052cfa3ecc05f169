#pragma once
#include "core/ops/layernorm.hpp"

namespace cf::ops {

/// y[t,h] = gamma[h] * x[t,h] / sqrt(mean_h(x[t,h]^2) + eps). The mean of squares is float32 or wider, whatever the
/// dtype; y is rounded once, after gamma.
/// Source: Zhang, Sennrich 2019 (arXiv:1910.07467); transformers' LlamaRMSNorm, which rounds before gamma too.
/// Refuses eps <= 0.
struct RmsNorm : NormContract<RmsNorm> {
  static constexpr std::string_view name = "rmsnorm";
  struct Args {
    using Op = RmsNorm;
    ConstAnyView<2> x{};      // (tokens, hidden)
    ConstAnyView<1> gamma{};  // (hidden)
    AnyView<2> y{};           // (tokens, hidden)
    double eps = 1e-5;
  };

  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.hidden));
    f(TensorSpec{Role::gain, "gamma"}, a.gamma, extents(d.hidden));
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.hidden));
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double hidden = double(d.hidden), n = double(d.tokens) * hidden;
    return {2 * n * double(size_bytes(activation)) + hidden * double(size_bytes(weight)), 4 * n};
  }
};

}  // namespace cf::ops
