#pragma once
#include "core/contract.hpp"
#include "core/weights.hpp"

namespace cf::ops {

/// What happens to a product before it is stored.
enum class Epilogue : std::uint8_t { none, gelu_erf, gelu_tanh, residual };

/// y[t,o] = f(sum_k x[t,k] * W[o,k] + bias[o]), summed in the compute type and rounded once, after f:
///   none       f(v) = v
///   gelu_erf   f(v) = v/2 (1 + erf(v / sqrt 2))
///   gelu_tanh  f(v) = v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3)))
///   residual   f(v) = v + residual[t,o]
/// GELU: Hendrycks, Gimpel 2016 (arXiv:1606.08415).
/// Source: torch.nn.Linear; the MLP of transformers' GPTNeoXMLP.
/// Refuses a residual without its epilogue, and the epilogue without its residual; GPTQ weights where a backend has no
/// kernel for them (Code::unimplemented).
struct Linear {
  static constexpr std::string_view name = "linear";
  struct Dims {
    std::int64_t tokens, in, out;
    bool residual;
  };
  struct Args {
    using Op = Linear;
    ConstAnyView<2> x{};         // (tokens, in)
    LinearParams linear{};       // weight (out, in), bias (out) or empty
    ConstAnyView<2> residual{};  // (tokens, out), with Epilogue::residual only
    AnyView<2> y{};              // (tokens, out)
    Epilogue epilogue = Epilogue::none;
  };

  static Dims dims(const Args& a) {
    return {a.x.shape[0], a.x.shape[1], a.y.shape[1], a.epilogue == Epilogue::residual};
  }
  /// The MLP's first product; tests and benchmarks set other sizes and epilogues themselves.
  static std::pair<Dims, Args> example(const ModelConfig& m, const Workload& w) {
    return {{w.tokens(), m.hidden_size, m.intermediate_size, false}, {.epilogue = Epilogue::gelu_erf}};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(Role::input, "x", a.x, extents(d.tokens, d.in));
    linear_tensors(d.out, d.in, a.linear, f);
    if (d.residual) f(Role::input, "residual", a.residual, extents(d.tokens, d.out));
    f(Role::output, "y", a.y, extents(d.tokens, d.out));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<Linear>(a));
    if (a.residual && a.epilogue != Epilogue::residual)
      return bad_argument(name, "'residual' is given, expected Epilogue::residual with it");
    return {};
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double t = double(d.tokens), in = double(d.in), out = double(d.out);
    return {(out * in + out) * double(size_bytes(weight)) +
                t * (in + out * (d.residual ? 2 : 1)) * double(size_bytes(activation)),
            2 * t * in * out};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.in, p, c); }

  /// A Linear's tensors, for every op that holds one.
  template <class L, class F>
  static void linear_tensors(std::int64_t out, std::int64_t in, L& linear, F&& f,
                             std::string_view weight_name = "weight", std::string_view bias_name = "bias") {
    if (auto* dense = std::get_if<DenseWeight>(&linear.weight))
      f(Role::weight, weight_name, dense->weight, extents(out, in));
    f(Role::weight, bias_name, linear.bias, extents(out), true);
  }
};

}  // namespace cf::ops
