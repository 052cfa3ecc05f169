#include <algorithm>
#include <vector>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/dequantise.hpp"
#include "cpu_ref/ops/activation.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/widen.hpp"
#include "cpu_ref/simd/kernels.hpp"

namespace cf::cpu_ref {
namespace {

using ops::Epilogue;

/// What happens to an output's sum, or with SwiGLU to its two sums, before it is stored: bias, then the epilogue.
template <class Real>
class Finish {
 public:
  Finish(const ops::Linear::Args& a, std::int64_t out) : epilogue_(a.epilogue), out_(out) {
    bias_.setZero(out * ops::rows_of_output(epilogue_));
    if (a.linear.bias) widen_row(a.linear.bias.data, a.linear.bias.dtype, 0, bias_.size(), bias_.data());
    if (a.residual) residual_ = a.residual.as<const Real>().data;
  }
  /// `sums` are those of the output's rows, `stride` elements apart.
  Real operator()(std::int64_t token, std::int64_t o, const Real* sums, std::int64_t stride) const {
    if (epilogue_ == Epilogue::swiglu) return silu(sums[0] + bias_[2 * o]) * (sums[stride] + bias_[2 * o + 1]);
    const Real v = sums[0] + bias_[o];
    switch (epilogue_) {
      case Epilogue::none:
      case Epilogue::swiglu: return v;
      case Epilogue::gelu_erf: return gelu_erf(v);
      case Epilogue::gelu_tanh: return gelu_tanh(v);
      case Epilogue::residual: return v + residual_[token * out_ + o];
    }
    return v;
  }

 private:
  Epilogue epilogue_;
  std::int64_t out_;
  Array<Real> bias_;
  const Real* residual_ = nullptr;
};

/// Beyond this many tokens the product is bound by arithmetic, where Eigen's blocking pays.
constexpr std::int64_t kFewTokens = 8;
/// Rows of a weight that make one output, at most: those of the gate and of up.
constexpr std::int64_t kMostRows = 2;
/// The same of a quantised matrix, whose rows cost more to dequantise for Eigen than a few passes over its words cost: a
/// prompt of 64 ids takes Pythia-2.8B 3.2 s with passes and 4.8 s without, one of 128 ids 6 s in both ways (two threads
/// of a Xeon).
constexpr std::int64_t kFewQuantisedTokens = 64;

/// A few tokens: each weight row is read once, widened in registers, and multiplied with every token.
template <class W>
void run_dots(const ops::Linear::Args& a, const DenseWeight& dense,
              void (*dot)(const W*, const float*, std::int64_t, std::int64_t, std::int64_t, float*),
              std::int64_t tokens) {
  const auto d = ops::Linear::dims(a);
  const Finish<float> finish(a, d.out);
  const std::int64_t rows = d.rows_of_output;
  const W* w = dense.weight.as<const W>().data;
  const float* x = a.x.as<const float>().data;
  float* y = a.y.as<float>().data;
#pragma omp parallel for schedule(static)
  for (std::int64_t o = 0; o < d.out; ++o) {
    float sums[kMostRows * kFewTokens];
    for (std::int64_t r = 0; r < rows; ++r)
      dot(w + (o * rows + r) * d.in, x, d.in, d.in, tokens, sums + r * kFewTokens);
    for (std::int64_t t = 0; t < tokens; ++t) y[t * d.out + o] = finish(t, o, sums + t, kFewTokens);
  }
}

/// The same for a quantised matrix: each word is dequantised in registers, once for up to kFewTokens tokens.
void run_dots(const ops::Linear::Args& a, const GptqWeight& gptq, std::int64_t tokens) {
  constexpr std::int64_t columns = GptqColumns::kColumns;
  const auto d = ops::Linear::dims(a);
  const Finish<float> finish(a, d.out);
  const std::int64_t groups = gptq.scales.shape[0], word_rows = gptq.qweight.shape[0], rows = d.rows();
  static_assert(columns % kMostRows == 0, "a block has all rows of its outputs");
  const float* x = a.x.as<const float>().data;
  float* y = a.y.as<float>().data;
#pragma omp parallel
  {
    std::vector<float> zeros(std::size_t(groups * columns)), scales(zeros.size());
    std::vector<std::int32_t> last_words;  // of the last columns, where they are fewer than a block
    float sums[kFewTokens * columns];
#pragma omp for schedule(static)
    for (std::int64_t first = 0; first < rows; first += columns) {
      const std::int64_t n = std::min(columns, rows - first);
      GptqColumns block{gptq.qweight.data + first, rows, gptq.bits, gptq.g_idx.data, zeros.data(), scales.data()};
      if (n < columns) {
        last_words.assign(std::size_t(word_rows * columns), 0);
        for (std::int64_t row = 0; row < word_rows; ++row)
          std::copy_n(block.words + row * rows, n, last_words.data() + row * columns);
        block.words = last_words.data();
        block.word_stride = columns;
      }
      for (std::int64_t g = 0; g < groups; ++g)
        for (std::int64_t i = 0; i < n; ++i) {
          zeros[std::size_t(g * columns + i)] = float(gptq_zero(gptq, g, first + i));
          scales[std::size_t(g * columns + i)] = widen<float>(gptq.scales.data[g * rows + first + i]);
        }
      for (std::int64_t token = 0; token < tokens; token += kFewTokens) {
        const std::int64_t some = std::min(kFewTokens, tokens - token);
        kernels().gptq_columns(block, x + token * d.in, d.in, some, sums);
        for (std::int64_t t = 0; t < some; ++t)
          for (std::int64_t i = 0; i < n; i += d.rows_of_output) {
            const std::int64_t o = (first + i) / d.rows_of_output;
            y[(token + t) * d.out + o] = finish(token + t, o, sums + t * columns + i, 1);
          }
      }
    }
  }
}

/// Rows of the weight in the arithmetic type, one after the other.
template <class Real>
void load_rows(const LinearWeight& weight, std::int64_t in, std::int64_t first, std::int64_t rows, Real* to) {
  if (const auto* gptq = std::get_if<GptqWeight>(&weight)) return dequantise_rows(*gptq, first, rows, to);
  const ConstAnyView<2>& dense = std::get<DenseWeight>(weight).weight;
  widen_row(dense.data, dense.dtype, first * in, rows * in, to);
}

/// sums = w x^T, by Eigen: in float with the best instructions that the processor has.
void multiply(const Rows<float>& w, std::int64_t rows, const Eigen::Map<const Rows<float>>& x, Rows<float>& sums) {
  sums.resize(rows, x.rows());
  kernels().product(w.data(), rows, x.data(), x.rows(), x.cols(), sums.data());
}
void multiply(const Rows<double>& w, std::int64_t rows, const Eigen::Map<const Rows<double>>& x, Rows<double>& sums) {
  sums.noalias() = w.topRows(rows) * x.transpose();
}

/// Any number of tokens: blocks of weight rows are widened and multiplied. One thread computes a block, always in the
/// same order, so that the bits do not depend on the number of threads.
template <class Real>
void run_blocks(const ops::Linear::Args& a) {
  const auto d = ops::Linear::dims(a);
  // Each block packs x again, so blocks are large; 16 blocks keep 16 threads busy. A prompt of 512 ids takes
  // Pythia-410M 3.6 s with 64 rows a block, 2.6 to 3.1 s with up to 192 (two cores with AVX-512).
  const std::int64_t block = std::clamp<std::int64_t>(d.out / 16, 32, 192), rows_of_output = d.rows_of_output;
  const Finish<Real> finish(a, d.out);
  const Eigen::Map<const Rows<Real>> x(a.x.as<const Real>().data, d.tokens, d.in);
  Real* y = a.y.as<Real>().data;
#pragma omp parallel
  {
    Rows<Real> w(block * rows_of_output, d.in), sums;
#pragma omp for schedule(static)
    for (std::int64_t first = 0; first < d.out; first += block) {
      const std::int64_t outputs = std::min(block, d.out - first), rows = outputs * rows_of_output;
      load_rows(a.linear.weight, d.in, first * rows_of_output, rows, w.data());
      multiply(w, rows, x, sums);
      for (std::int64_t o = 0; o < outputs; ++o)
        for (std::int64_t t = 0; t < d.tokens; ++t)
          y[t * d.out + first + o] = finish(t, first + o, &sums(o * rows_of_output, t), d.tokens);
    }
  }
}

/// Refuses a packed weight, and a g_idx that names a group which does not exist.
Status check_weight(const ops::Linear::Args& a) {
  if (const auto* packed = std::get_if<PackedWeight>(&a.linear.weight))
    return Status::error(Code::unimplemented, "linear: cpu_ref takes dense or GPTQ weights, got a weight packed by " +
                                                  std::string(packed->packer));
  const auto* gptq = std::get_if<GptqWeight>(&a.linear.weight);
  if (!gptq) return {};
  return check_index(ops::Linear::name, "g_idx", gptq->g_idx, 0, gptq->scales.shape[0] - 1);
}

}  // namespace

Status run(const ops::Linear::Args& a) {
  CF_TRY(ops::Linear::check(a));
  CF_TRY(check_weight(a));
  return with_real(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    const std::int64_t tokens = a.x.shape[0];
    if constexpr (std::is_same_v<Real, float>) {
      const auto* gptq = std::get_if<GptqWeight>(&a.linear.weight);
      if (gptq && tokens <= kFewQuantisedTokens) return run_dots(a, *gptq, tokens), Status{};
      if (!gptq && tokens <= kFewTokens) {
        const DenseWeight& dense = std::get<DenseWeight>(a.linear.weight);
        switch (dense.weight.dtype) {
          case DType::f16: return run_dots<f16>(a, dense, kernels().dot_f16, tokens), Status{};
          case DType::bf16: return run_dots<bf16>(a, dense, kernels().dot_bf16, tokens), Status{};
          case DType::f32: return run_dots<float>(a, dense, kernels().dot_f32, tokens), Status{};
          default: break;
        }
      }
    }
    run_blocks<Real>(a);
    return {};
  });
}

Result<Condition> condition(const ops::Linear::Args& a) {
  CF_TRY(ops::Linear::check(a));
  CF_TRY(check_weight(a));
  const auto d = ops::Linear::dims(a);
  // The slopes of GELU and SiLU are at most these: the functions make an error larger by this factor at most.
  constexpr double gelu_slope = 1.13, silu_slope = 1.1;
  Rows<double> x(d.tokens, d.in), largest(d.out, d.tokens), result(d.out, d.tokens);
  widen_row(a.x.data, a.x.dtype, 0, x.size(), x.data());
  Array<double> bias = Array<double>::Zero(d.rows());
  if (a.linear.bias) widen_row(a.linear.bias.data, a.linear.bias.dtype, 0, d.rows(), bias.data());
#pragma omp parallel for
  for (std::int64_t o = 0; o < d.out; ++o) {
    Rows<double> w(d.rows_of_output, d.in);
    load_rows(a.linear.weight, d.in, o * d.rows_of_output, d.rows_of_output, w.data());
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      double s = 0, most = 0;
      const auto add = [&](double term) { most = std::max(most, std::abs(s += term)); };
      const auto add_row = [&](std::int64_t r) {
        for (std::int64_t k = 0; k < d.in; ++k) add(w(r, k) * x(t, k));
        add(bias[o * d.rows_of_output + r]);
      };
      add_row(0);
      if (a.epilogue == Epilogue::residual) add(load_element(a.residual.data, a.residual.dtype, t * d.out + o));
      if (a.epilogue == Epilogue::gelu_erf) s = gelu_erf(s), most *= gelu_slope;
      if (a.epilogue == Epilogue::gelu_tanh) s = gelu_tanh(s), most *= gelu_slope;
      if (a.epilogue == Epilogue::swiglu) {
        // To first order a product's error is that of each factor times the other.
        const double gate = silu(s), gate_most = silu_slope * most;
        s = most = 0;
        add_row(1);
        most = gate_most * std::abs(s) + std::abs(gate) * most;
        s *= gate;
      }
      largest(o, t) = most;
      result(o, t) = s;
    }
  }
  ConditionSum sum;
  for (Eigen::Index i = 0; i < largest.size(); ++i) sum.add(largest.data()[i], result.data()[i]);
  return sum.value();
}

}  // namespace cf::cpu_ref
