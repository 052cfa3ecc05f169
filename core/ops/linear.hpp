#pragma once
#include <algorithm>

#include "core/contract.hpp"
#include "core/weights.hpp"

namespace cf::ops {

/// What happens to a product before it is stored.
enum class Epilogue : std::uint8_t { none, gelu_erf, gelu_tanh, residual, swiglu };

constexpr bool is_gelu(Epilogue e) { return e == Epilogue::gelu_erf || e == Epilogue::gelu_tanh; }

/// The rows of the weight that make one output.
constexpr std::int64_t rows_of_output(Epilogue e) { return e == Epilogue::swiglu ? 2 : 1; }

/// y[t,o] = f(sum_k x[t,k] * W[o,k] + bias[o]), summed in the compute type and rounded once, after f:
///   none       f(v) = v
///   gelu_erf   f(v) = v/2 (1 + erf(v / sqrt 2))
///   gelu_tanh  f(v) = v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3)))
///   residual   f(v) = v + residual[t,o]
///   swiglu     of two sums: y[t,o] = silu(g) u, silu(g) = g / (1 + exp(-g)). Row 2 o of W, the gate's row o, makes g;
///              row 2 o + 1, the up product's row o, makes u. W and bias have 2 * out rows.
/// GELU: Hendrycks, Gimpel 2016 (arXiv:1606.08415). SwiGLU: Shazeer 2020 (arXiv:2002.05202). Source: torch.nn.Linear;
/// the MLPs of transformers' GPTNeoXMLP and LlamaMLP.
/// Refuses a residual without its epilogue, and the epilogue without its residual; GPTQ weights of other than 4 or 8
/// bits, whose words do not divide in and out, or without a group_size; packed weights of another size; and weights for
/// which a backend has no kernel, those that another backend packed among them (Code::unimplemented).
struct Linear {
  static constexpr std::string_view name = "linear";
  struct Dims {
    std::int64_t tokens, in, out;
    bool residual;
    WeightFormat weight{};
    std::int64_t rows_of_output = 1;
    /// Rows of the weight.
    std::int64_t rows() const { return out * rows_of_output; }
  };
  struct Args {
    using Op = Linear;
    ConstAnyView<2> x{};         // (tokens, in)
    LinearParams linear{};       // weight (out, in), bias (out) or empty; with swiglu of 2 * out rows
    ConstAnyView<2> residual{};  // (tokens, out), with Epilogue::residual only
    AnyView<2> y{};              // (tokens, out)
    Epilogue epilogue = Epilogue::none;
  };

  static Dims dims(const Args& a) {
    return {a.x.shape[0],
            a.x.shape[1],
            a.y.shape[1],
            a.epilogue == Epilogue::residual,
            format_of(a.linear.weight),
            ops::rows_of_output(a.epilogue)};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.tokens, d.in));
    linear_tensors(d.rows(), d.in, a.linear, f);
    if (d.residual) f(TensorSpec{Role::input, "residual"}, a.residual, extents(d.tokens, d.out));
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.out));
  }
  static Status check(const Args& a) {
    CF_TRY(check_linear(name, dims(a).rows(), a.x.shape[1], a.linear));
    CF_TRY(check_tensors<Linear>(a));
    if (a.residual && a.epilogue != Epilogue::residual)
      return bad_argument(name, "'residual' is given, expected Epilogue::residual with it");
    return {};
  }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double t = double(d.tokens), in = double(d.in), out = double(d.out), rows = double(d.rows());
    return {d.weight.bytes(d.rows(), d.in, weight) + rows * double(size_bytes(weight)) +
                t * (in + out * (d.residual ? 2 : 1)) * double(size_bytes(activation)),
            2 * t * in * rows};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.in, p, c); }

  /// Checks the fields of a quantised or packed weight, before its tensors' shapes are checked. Every op that holds a
  /// Linear calls this first.
  static Status check_linear(std::string_view op, std::int64_t out, std::int64_t in, const LinearParams& linear) {
    if (const auto* packed = std::get_if<PackedWeight>(&linear.weight);
        packed && (packed->out != out || packed->in != in))
      return bad_argument(op, "the packed weight is (" + std::to_string(packed->out) + ", " +
                                  std::to_string(packed->in) + "), expected (" + std::to_string(out) + ", " +
                                  std::to_string(in) + ")");
    const auto* gptq = std::get_if<GptqWeight>(&linear.weight);
    if (!gptq) return {};
    if (gptq->bits != 4 && gptq->bits != 8)
      return bad_argument(op, "GPTQ bits must be 4 or 8, got " + std::to_string(gptq->bits));
    if (gptq->group_size < 1)
      return bad_argument(op, "GPTQ group_size must be at least 1, got " + std::to_string(gptq->group_size));
    for (const auto& [size, value] : {std::pair{"in", in}, {"out", out}})
      if (value % gptq->codes_per_word())
        return bad_argument(op, std::string(size) + " must be a multiple of the " +
                                    std::to_string(gptq->codes_per_word()) + " codes in a word, got " +
                                    std::to_string(value));
    return {};
  }

  /// Calls f for each tensor of a Linear. Every op that holds a Linear uses this.
  template <class L, class F>
  static void linear_tensors(std::int64_t out, std::int64_t in, L& linear, F&& f,
                             std::string_view weight_name = "weight", std::string_view bias_name = "bias") {
    if (auto* dense = std::get_if<DenseWeight>(&linear.weight))
      f(TensorSpec{Role::weight, weight_name}, dense->weight, extents(out, in));
    if (auto* gptq = std::get_if<GptqWeight>(&linear.weight)) for_each_gptq_tensor(*gptq, out, in, f);
    if (auto* packed = std::get_if<PackedWeight>(&linear.weight))
      f(TensorSpec{Role::gptq, "packed"}, packed->data, extents(packed->data.shape[0]));
    f(TensorSpec{Role::weight, bias_name, true}, linear.bias, extents(out));
  }
};

}  // namespace cf::ops
