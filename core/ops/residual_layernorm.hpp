#pragma once
#include "core/ops/layernorm.hpp"

namespace cf::ops {

/// h[t,c] = x + a + b;  y[t,c] = LayerNorm(h)[t,c]. Both are returned. The norm reads h as stored: rounded to the
/// activation's dtype, so that y is the LayerNorm of the h that the caller sees.
/// With a = attention and b = mlp this is the end of a parallel-residual layer and the beginning of the next. For
/// programs that call ops: no model of this library uses it.
/// Refuses eps <= 0.
struct ResidualLayerNorm : NormContract<ResidualLayerNorm> {
  static constexpr std::string_view name = "residual_layernorm";
  struct Args {
    using Op = ResidualLayerNorm;
    ConstAnyView<2> x{}, a{}, b{};  // (tokens, hidden)
    NormParams norm{};              // gamma, beta: (hidden)
    AnyView<2> h{}, y{};            // (tokens, hidden)
    double eps = 1e-5;
  };

  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.hidden));
    f(TensorSpec{Role::input, "a"}, a.a, extents(d.tokens, d.hidden));
    f(TensorSpec{Role::input, "b"}, a.b, extents(d.tokens, d.hidden));
    norm_tensors(d, a.norm, f);
    f(TensorSpec{Role::output, "h"}, a.h, extents(d.tokens, d.hidden));
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.hidden));
  }
  static Cost cost(const Dims& d, DType activation, DType weight) { return row_cost(d, 5, activation, weight); }
  /// The bound of y and of h. y carries h's rounding beside its own.
  static Budget budget(const Dims& d, Precision p, Condition c = {}) {
    Budget b = reduction_budget(d.hidden, p, c);
    return b += {unit_roundoff(p.output) * c.l2, unit_roundoff(p.output) * c.max};
  }
};

}  // namespace cf::ops
