#pragma once
#include "core/ops/layernorm.hpp"

namespace cf::ops {

/// h[t,c] = x + a + b;  y[t,c] = LayerNorm(h)[t,c]. Both are returned. The norm reads h as stored: rounded to the
/// activation's dtype, so that y is the LayerNorm of the h that the caller sees.
/// With a = attention and b = mlp this is the end of a parallel-residual layer and the head of the next.
/// Refuses eps <= 0.
struct ResidualLayerNorm {
  static constexpr std::string_view name = "residual_layernorm";
  using Dims = LayerNorm::Dims;
  struct Args {
    using Op = ResidualLayerNorm;
    ConstAnyView<2> x{}, a{}, b{};  // (tokens, hidden)
    NormParams norm{};              // gamma, beta: (hidden)
    AnyView<2> h{}, y{};            // (tokens, hidden)
    double eps = 1e-5;
  };

  static Dims dims(const Args& a) { return {a.x.shape[0], a.x.shape[1]}; }
  static std::pair<Dims, Args> example(const ModelConfig& m, const Workload& w) {
    return {{w.tokens(), m.hidden_size}, {.eps = m.layer_norm_eps}};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(Role::input, "x", a.x, extents(d.tokens, d.hidden));
    f(Role::input, "a", a.a, extents(d.tokens, d.hidden));
    f(Role::input, "b", a.b, extents(d.tokens, d.hidden));
    LayerNorm::norm_tensors(d.hidden, a.norm, f);
    f(Role::output, "h", a.h, extents(d.tokens, d.hidden));
    f(Role::output, "y", a.y, extents(d.tokens, d.hidden));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<ResidualLayerNorm>(a));
    return LayerNorm::check_eps(name, a.eps);
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    Cost c = LayerNorm::cost(d, activation, weight);
    const double n = double(d.tokens) * double(d.hidden);
    return c += {3 * n * double(size_bytes(activation)), 2 * n};
  }
  /// y's bound, which is h's too: y carries h's rounding beside its own.
  static Budget budget(const Dims& d, Precision p, Condition c = {}) {
    Budget b = reduction_budget(d.hidden, p, c);
    return b += {unit_roundoff(p.output) * c.l2, unit_roundoff(p.output) * c.max};
  }
};

}  // namespace cf::ops
