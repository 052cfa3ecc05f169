#pragma once
#include "core/contract.hpp"
#include "core/weights.hpp"

namespace cf::ops {

/// What the ops around a norm share: sizes, the check of eps, the bound.
template <class Op>
struct NormContract {
  struct Dims {
    std::int64_t tokens, hidden;
  };

  template <class Args>
  static Dims dims(const Args& a) {
    return {a.x.shape[0], a.x.shape[1]};
  }
  template <class N, class F>
  static void norm_tensors(const Dims& d, N& norm, F&& f, std::string_view gamma = "gamma",
                           std::string_view beta = "beta") {
    f(TensorSpec{Role::gain, gamma}, norm.gamma, extents(d.hidden));
    f(TensorSpec{Role::weight, beta}, norm.beta, extents(d.hidden));
  }
  template <class Args>
  static Status check(const Args& a) {
    CF_TRY(check_tensors<Op>(a));
    if (!(a.eps > 0)) return bad_argument(Op::name, "eps must be positive, got " + std::to_string(a.eps));
    return {};
  }
  /// The cost of a norm that reads or writes `rows` rows of activations for each token.
  static Cost row_cost(const Dims& d, int rows, DType activation, DType weight) {
    const double n = double(d.tokens) * double(d.hidden);
    return {rows * n * double(size_bytes(activation)) + 2 * double(d.hidden) * double(size_bytes(weight)),
            (6 + rows) * n};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.hidden, p, c); }
};

/// y[t,h] = (x[t,h] - mean[t]) / sqrt(var[t] + eps) * gamma[h] + beta[h], with the biased variance (divided by hidden).
/// Source: Ba, Kiros, Hinton 2016 (arXiv:1607.06450); torch.nn.LayerNorm as transformers' GPTNeoXLayer uses it.
/// Refuses eps <= 0.
struct LayerNorm : NormContract<LayerNorm> {
  static constexpr std::string_view name = "layernorm";
  struct Args {
    using Op = LayerNorm;
    ConstAnyView<2> x{};  // (tokens, hidden)
    NormParams norm{};    // gamma, beta: (hidden)
    AnyView<2> y{};       // (tokens, hidden)
    double eps = 1e-5;
  };

  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.hidden));
    norm_tensors(d, a.norm, f);
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.hidden));
  }
  static Cost cost(const Dims& d, DType activation, DType weight) { return row_cost(d, 2, activation, weight); }
};

}  // namespace cf::ops
