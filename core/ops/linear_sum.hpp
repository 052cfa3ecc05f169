#pragma once
#include "core/ops/linear.hpp"

namespace cf::ops {

/// Two products, the second of which adds what the first makes, in one op:
///   sum = residual + x W^T + bias             (sum = x W^T + bias where there is no residual)
///   y   = sum + x2 W2^T + bias2
/// sum is rounded to its dtype before it is added, as Linear rounds it.
/// Source: the end of a layer with a parallel residual, transformers' GPTNeoXLayer.forward.
/// Refuses what Linear refuses.
struct LinearSum {
  static constexpr std::string_view name = "linear_sum";
  struct Dims {
    std::int64_t tokens, in, in2, out;
    bool residual = true;
    WeightFormat weight{}, weight2{};
  };
  struct Args {
    using Op = LinearSum;
    ConstAnyView<2> x{};         // (tokens, in)
    LinearParams linear{};       // weight (out, in), bias (out) or empty
    ConstAnyView<2> residual{};  // (tokens, out), or empty
    AnyView<2> sum{};            // (tokens, out)
    ConstAnyView<2> x2{};        // (tokens, in2)
    LinearParams linear2{};      // weight (out, in2), bias (out) or empty
    AnyView<2> y{};              // (tokens, out)
  };

  static Dims dims(const Args& a) {
    return {a.x.shape[0],
            a.x.shape[1],
            a.x2.shape[1],
            a.y.shape[1],
            bool(a.residual),
            format_of(a.linear.weight),
            format_of(a.linear2.weight)};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.in));
    Linear::linear_tensors(d.out, d.in, a.linear, f);
    if (d.residual) f(TensorSpec{Role::input, "residual"}, a.residual, extents(d.tokens, d.out));
    f(TensorSpec{Role::output, "sum"}, a.sum, extents(d.tokens, d.out));
    f(TensorSpec{Role::input, "x2"}, a.x2, extents(d.tokens, d.in2));
    Linear::linear_tensors(d.out, d.in2, a.linear2, [&](const TensorSpec& t, auto& view, const auto& shape) {
      const std::string second = "second." + std::string(t.name);
      f(TensorSpec{t.role, second, t.optional}, view, shape);
    });
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.out));
  }
  static Status check(const Args& a) {
    CF_TRY(Linear::check_linear(name, a.y.shape[1], a.x.shape[1], a.linear));
    CF_TRY(Linear::check_linear(name, a.y.shape[1], a.x2.shape[1], a.linear2));
    return check_tensors<LinearSum>(a);
  }
  /// Linear's of both parts. The sum is written, and not read again.
  static Cost cost(const Dims& d, DType activation, DType weight) {
    Cost c = Linear::cost({d.tokens, d.in, d.out, d.residual, d.weight}, activation, weight);
    return c += Linear::cost({d.tokens, d.in2, d.out, false, d.weight2}, activation, weight);
  }
  /// `condition` is the sum over the parts of their conditions times sqrt(terms), as cpu_ref::condition() measures it;
  /// the sum is rounded once more than y.
  static Budget budget(const Dims&, Precision p, Condition c = {}) {
    const double stores = unit_roundoff(p.output);
    return reduction_budget(1, p, c) += {stores, stores};
  }

  /// The op as its parts: calls f with the Args of both products in turn, and stops at the first Status that is not ok.
  template <class F>
  static Status for_each_part(const Args& a, F&& f) {
    CF_TRY(f(Linear::Args{.x = a.x,
                          .linear = a.linear,
                          .residual = a.residual,
                          .y = a.sum,
                          .epilogue = a.residual ? Epilogue::residual : Epilogue::none}));
    return f(Linear::Args{.x = a.x2, .linear = a.linear2, .residual = a.sum, .y = a.y, .epilogue = Epilogue::residual});
  }
  /// The inverse of for_each_part. `first` has no epilogue but the residual; `second` adds first.y.
  static Args of_parts(const Linear::Args& first, const Linear::Args& second) {
    return {.x = first.x,
            .linear = first.linear,
            .residual = first.residual,
            .sum = first.y,
            .x2 = second.x,
            .linear2 = second.linear,
            .y = second.y};
  }
};

}  // namespace cf::ops
