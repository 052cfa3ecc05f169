#pragma once
#include "core/ops/layernorm.hpp"

namespace cf::ops {

/// y[t,h] = LayerNorm(x)[t,h] + residual[t,h]: the norm of LayerNorm, then the sum, rounded once.
/// Refuses eps <= 0.
struct LayerNormResidual {
  static constexpr std::string_view name = "layernorm_residual";
  using Dims = LayerNorm::Dims;
  struct Args {
    using Op = LayerNormResidual;
    ConstAnyView<2> x{}, residual{};  // (tokens, hidden)
    NormParams norm{};                // gamma, beta: (hidden)
    AnyView<2> y{};                   // (tokens, hidden)
    double eps = 1e-5;
  };

  static Dims dims(const Args& a) { return {a.x.shape[0], a.x.shape[1]}; }
  static std::pair<Dims, Args> example(const ModelConfig& m, const Workload& w) {
    return {{w.tokens(), m.hidden_size}, {.eps = m.layer_norm_eps}};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(Role::input, "x", a.x, extents(d.tokens, d.hidden));
    f(Role::input, "residual", a.residual, extents(d.tokens, d.hidden));
    LayerNorm::norm_tensors(d.hidden, a.norm, f);
    f(Role::output, "y", a.y, extents(d.tokens, d.hidden));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<LayerNormResidual>(a));
    return LayerNorm::check_eps(name, a.eps);
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    Cost c = LayerNorm::cost(d, activation, weight);
    const double n = double(d.tokens) * double(d.hidden);
    return c += {n * double(size_bytes(activation)), n};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.hidden, p, c); }
};

}  // namespace cf::ops
