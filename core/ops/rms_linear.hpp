#pragma once
#include "core/ops/linear.hpp"
#include "core/ops/rmsnorm.hpp"

namespace cf::ops {

/// RMSNorm and the product behind it in one op:
///   z = RmsNorm(x; gamma, eps),  y = Linear(z; linear, epilogue)
/// z is not an output. RmsNorm and Linear define the rest.
/// Source: transformers' LlamaDecoderLayer, from a norm to the first product behind it.
/// Refuses what RmsNorm and Linear refuse, and Epilogue::residual.
struct RmsLinear {
  static constexpr std::string_view name = "rms_linear";
  struct Dims {
    std::int64_t tokens, hidden, out;
    std::int64_t rows_of_output = 1;
    WeightFormat weight{};
    std::int64_t rows() const { return out * rows_of_output; }
  };
  struct Args {
    using Op = RmsLinear;
    ConstAnyView<2> x{};      // (tokens, hidden)
    ConstAnyView<1> gamma{};  // (hidden)
    LinearParams linear{};    // weight (out, hidden), bias (out) or empty; with swiglu of 2 * out rows
    AnyView<2> y{};           // (tokens, out)
    Epilogue epilogue = Epilogue::none;
    double eps = 1e-5;
  };

  static Dims dims(const Args& a) {
    return {a.x.shape[0], a.x.shape[1], a.y.shape[1], ops::rows_of_output(a.epilogue), format_of(a.linear.weight)};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.hidden));
    f(TensorSpec{Role::gain, "gamma"}, a.gamma, extents(d.hidden));
    Linear::linear_tensors(d.rows(), d.hidden, a.linear, f);
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.out));
  }
  static Status check(const Args& a) {
    CF_TRY(Linear::check_linear(name, dims(a).rows(), a.x.shape[1], a.linear));
    CF_TRY(check_tensors<RmsLinear>(a));
    if (!(a.eps > 0)) return bad_argument(name, "eps must be positive, got " + std::to_string(a.eps));
    if (a.epilogue == Epilogue::residual) return bad_argument(name, "expected another epilogue than the residual");
    return {};
  }
  /// Linear's, whose x is the norm's, and gamma.
  static Cost cost(const Dims& d, DType activation, DType weight) {
    Cost c = Linear::cost({d.tokens, d.hidden, d.out, false, d.weight, d.rows_of_output}, activation, weight);
    return c += {double(d.hidden) * double(size_bytes(weight)), 4 * double(d.tokens) * double(d.hidden)};
  }
  /// `condition` is the sum over the parts of their conditions times sqrt(terms), as cpu_ref::condition() measures it;
  /// z may be rounded to the output's dtype.
  static Budget budget(const Dims&, Precision p, Condition c = {}) {
    const double stores = unit_roundoff(p.output);
    return reduction_budget(1, p, c) += {stores, stores};
  }

  /// The op as its parts: calls f with the Args of RmsNorm and Linear in turn, with z (tokens, hidden) in the given
  /// tensor, and stops at the first Status that is not ok.
  template <class F>
  static Status for_each_part(const Args& a, const AnyView<2>& z, F&& f) {
    CF_TRY(f(RmsNorm::Args{.x = a.x, .gamma = a.gamma, .y = z, .eps = a.eps}));
    return f(Linear::Args{.x = z, .linear = a.linear, .y = a.y, .epilogue = a.epilogue});
  }
  /// The inverse of for_each_part. `linear` reads norm.y and adds no residual.
  static Args of_parts(const RmsNorm::Args& norm, const Linear::Args& linear) {
    return {.x = norm.x,
            .gamma = norm.gamma,
            .linear = linear.linear,
            .y = linear.y,
            .epilogue = linear.epilogue,
            .eps = norm.eps};
  }
};

}  // namespace cf::ops
