#pragma once
#include "core/ops/layernorm.hpp"

namespace cf::ops {

/// y[t,h] = LayerNorm(x)[t,h] + residual[t,h]: the norm of LayerNorm, then the sum, rounded once. For programs that
/// call ops: no model of this library uses it.
/// Refuses eps <= 0.
struct LayerNormResidual : NormContract<LayerNormResidual> {
  static constexpr std::string_view name = "layernorm_residual";
  struct Args {
    using Op = LayerNormResidual;
    ConstAnyView<2> x{}, residual{};  // (tokens, hidden)
    NormParams norm{};                // gamma, beta: (hidden)
    AnyView<2> y{};                   // (tokens, hidden)
    double eps = 1e-5;
  };

  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.hidden));
    f(TensorSpec{Role::input, "residual"}, a.residual, extents(d.tokens, d.hidden));
    norm_tensors(d, a.norm, f);
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.hidden));
  }
  static Cost cost(const Dims& d, DType activation, DType weight) { return row_cost(d, 3, activation, weight); }
};

}  // namespace cf::ops
