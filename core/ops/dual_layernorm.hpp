#pragma once
#include "core/ops/layernorm.hpp"

namespace cf::ops {

/// y1[t,h] = LayerNorm(x; norm1)[t,h];  y2[t,h] = LayerNorm(x; norm2)[t,h]: the norm of LayerNorm twice, on one mean
/// and variance of x. The beginning of a parallel-residual layer, with norm1 = input_layernorm and norm2 =
/// post_attention_layernorm.
/// Source: transformers GPTNeoXLayer.forward.
/// Refuses eps <= 0.
struct DualLayerNorm : NormContract<DualLayerNorm> {
  static constexpr std::string_view name = "dual_layernorm";
  struct Args {
    using Op = DualLayerNorm;
    ConstAnyView<2> x{};          // (tokens, hidden)
    NormParams norm1{}, norm2{};  // gamma, beta: (hidden)
    AnyView<2> y1{}, y2{};        // (tokens, hidden)
    double eps = 1e-5;
  };

  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.hidden));
    norm_tensors(d, a.norm1, f, "gamma1", "beta1");
    norm_tensors(d, a.norm2, f, "gamma2", "beta2");
    f(TensorSpec{Role::output, "y1"}, a.y1, extents(d.tokens, d.hidden));
    f(TensorSpec{Role::output, "y2"}, a.y2, extents(d.tokens, d.hidden));
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    return row_cost(d, 3, activation, weight) +=
           {2 * double(d.hidden) * double(size_bytes(weight)), double(d.tokens) * double(d.hidden)};
  }
};

}  // namespace cf::ops
