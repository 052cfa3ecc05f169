#pragma once
#include "core/contract.hpp"
#include "core/weights.hpp"

namespace cf::ops {

/// y[t,h] = (x[t,h] - mean[t]) / sqrt(var[t] + eps) * gamma[h] + beta[h], with the biased variance (divided by hidden).
/// Source: Ba, Kiros, Hinton 2016 (arXiv:1607.06450); torch.nn.LayerNorm as transformers' GPTNeoXLayer uses it.
/// Refuses eps <= 0.
struct LayerNorm {
  static constexpr std::string_view name = "layernorm";
  struct Dims {
    std::int64_t tokens, hidden;
  };
  struct Args {
    using Op = LayerNorm;
    ConstAnyView<2> x{};  // (tokens, hidden)
    NormParams norm{};    // gamma, beta: (hidden)
    AnyView<2> y{};       // (tokens, hidden)
    double eps = 1e-5;
  };

  static Dims dims(const Args& a) { return {a.x.shape[0], a.x.shape[1]}; }
  static std::pair<Dims, Args> example(const ModelConfig& m, const Workload& w) {
    return {{w.tokens(), m.hidden_size}, {.eps = m.layer_norm_eps}};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(Role::input, "x", a.x, extents(d.tokens, d.hidden));
    norm_tensors(d.hidden, a.norm, f);
    f(Role::output, "y", a.y, extents(d.tokens, d.hidden));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<LayerNorm>(a));
    return check_eps(name, a.eps);
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double n = double(d.tokens) * double(d.hidden);
    return {2 * n * double(size_bytes(activation)) + 2 * double(d.hidden) * double(size_bytes(weight)), 8 * n};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.hidden, p, c); }

  /// The part of the contract that every op with a LayerNorm in it shares.
  template <class N, class F>
  static void norm_tensors(std::int64_t hidden, N& norm, F&& f) {
    f(Role::weight, "gamma", norm.gamma, extents(hidden));
    f(Role::weight, "beta", norm.beta, extents(hidden));
  }
  static Status check_eps(std::string_view op, double eps) {
    if (!(eps > 0)) return bad_argument(op, "eps must be positive, got " + std::to_string(eps));
    return {};
  }
};

}  // namespace cf::ops
