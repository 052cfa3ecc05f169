#include <omp.h>

#include <algorithm>
#include <vector>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/dequantise.hpp"
#include "cpu_ref/ops/activation.hpp"
#include "cpu_ref/ops/invariant.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/weight_values.hpp"
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

/// The same of a GPTQ product. To dequantise its rows for Eigen costs more than to read its words again for each
/// kFewTokens tokens: a prompt of 128 ids takes Pythia-2.8B 4.3 s from words and 6.2 s through Eigen, one of 256 ids
/// 8.8 and 10.7 s (two cores of an EPYC 9004). Each further id costs the same in both ways.
constexpr std::int64_t kFewQuantisedTokens = 256;
/// Rows of a weight that make one output, at most: those of the gate and of up.
constexpr std::int64_t kMostRows = 2;

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// A few tokens: each weight row is read once, widened in registers, and multiplied with every token. More tokens are
/// taken a few at a time, and some rows stay in the cache meanwhile.
template <class W>
Status run_dots(const ops::Linear::Args& a, const DenseWeight& dense,
                void (*dot)(const W*, const float*, std::int64_t, std::int64_t, std::int64_t, float*),
                std::int64_t tokens) {
  const auto d = ops::Linear::dims(a);
  const Finish<float> finish(a, d.out);
  const std::int64_t rows = d.rows_of_output;
  const W* w = dense.weight.as<const W>().data;
  const float* x = a.x.as<const float>().data;
  float* y = a.y.as<float>().data;
  const auto make = [&](std::int64_t o, std::int64_t token, std::int64_t some) {
    float sums[kMostRows * kFewTokens];
    for (std::int64_t r = 0; r < rows; ++r)
      dot(w + (o * rows + r) * d.in, x + token * d.in, d.in, d.in, some, sums + r * kFewTokens);
    for (std::int64_t t = 0; t < some; ++t) y[(token + t) * d.out + o] = finish(token + t, o, sums + t, kFewTokens);
  };
  if (tokens <= kFewTokens) {
#pragma omp parallel for schedule(static)
    for (std::int64_t o = 0; o < d.out; ++o) make(o, 0, tokens);
    return {};
  }
  constexpr std::int64_t block = 16;
  return parallel_for(divide_up(d.out, block), [&](std::int64_t i) {
    for (std::int64_t token = 0; token < tokens; token += kFewTokens)
      for (std::int64_t o = i * block; o < std::min((i + 1) * block, d.out); ++o)
        make(o, token, std::min(kFewTokens, tokens - token));
  });
}

/// A GPTQ matrix as blocks of columns.
class GptqBlocks {
 public:
  explicit GptqBlocks(const GptqWeight& gptq)
      : gptq_(gptq), columns_(gptq.qweight.shape[1]), word_groups_(std::size_t(gptq.qweight.shape[0])) {
    const std::int64_t per_word = gptq.codes_per_word();
    for (std::size_t word = 0; word < word_groups_.size(); ++word) {
      const std::int32_t* const g = gptq.g_idx.data + std::int64_t(word) * per_word;
      const bool same = std::all_of(g, g + per_word, [g](std::int32_t i) { return i == *g; });
      word_groups_[word] = same ? *g : GptqColumns::kMixed;
    }
    // Each thread has the same number of blocks. Blocks are wide, because hardware fetches ahead within a row: two
    // cores of an EPYC 9004 read 15 GB/s of words with 256 columns, 19 with 1024, 23 with 1280 and 1536, 20 with 2560.
    constexpr std::int64_t most_columns = 1536;
    const std::int64_t threads = omp_get_max_threads();
    const std::int64_t blocks = threads * divide_up(columns_, threads * most_columns);
    width_ = whole(divide_up(columns_, blocks));
  }

  std::int64_t count() const { return divide_up(columns_, width_); }
  std::int64_t width() const { return width_; }

  /// Calls f(first column, columns, block). A block that is not whole is a copy, with zeros behind its columns.
  template <class F>
  void with_block(std::int64_t i, F f) const {
    const std::int64_t first = i * width_, n = std::min(width_, columns_ - first), per_word = gptq_.codes_per_word();
    GptqColumns block{.columns = whole(n),
                      .bits = gptq_.bits,
                      .zero_offset = float(gptq_.zero_offset),
                      .words = gptq_.qweight.data + first,
                      .word_stride = columns_,
                      .zeros = gptq_.qzeros.data + first / per_word,
                      .zero_stride = gptq_.qzeros.shape[1],
                      .scales = gptq_.scales.data + first,
                      .scale_stride = columns_,
                      .g_idx = gptq_.g_idx.data,
                      .word_groups = word_groups_.data()};
    std::vector<std::int32_t> words, zeros;
    std::vector<f16> scales;
    if (n < block.columns) {
      const std::int64_t groups = gptq_.scales.shape[0];
      block.words = padded(block.words, gptq_.qweight.shape[0], n, block.columns, block.word_stride, words);
      block.zeros = padded(block.zeros, groups, gptq_.qzeros.shape[1] - first / per_word, block.columns / per_word,
                           block.zero_stride, zeros);
      block.scales = padded(block.scales, groups, n, block.columns, block.scale_stride, scales);
    }
    f(first, n, block);
  }

 private:
  /// The columns that a block of so many has.
  static std::int64_t whole(std::int64_t columns) {
    return divide_up(columns, GptqColumns::kMultiple) * GptqColumns::kMultiple;
  }
  /// Copies the first n columns of each row to `to`, whose rows have `columns`. `stride` is the distance of rows,
  /// before and after.
  template <class T>
  static const T* padded(const T* from, std::int64_t rows, std::int64_t n, std::int64_t columns, std::int64_t& stride,
                         std::vector<T>& to) {
    to.assign(std::size_t(rows * columns), T{});
    for (std::int64_t row = 0; row < rows; ++row) std::copy_n(from + row * stride, n, to.data() + row * columns);
    stride = columns;
    return to.data();
  }

  const GptqWeight& gptq_;
  std::int64_t columns_, width_ = 0;
  std::vector<std::int32_t> word_groups_;
};

/// Multiplies a GPTQ matrix from its words, which are dequantised in registers.
Status run_dots(const ops::Linear::Args& a, const GptqWeight& gptq, std::int64_t tokens) {
  const auto d = ops::Linear::dims(a);
  const Finish<float> finish(a, d.out);
  const GptqBlocks blocks(gptq);
  static_assert(GptqColumns::kMultiple % kMostRows == 0, "a block has all rows of its outputs");
  const float* x = a.x.as<const float>().data;
  float* y = a.y.as<float>().data;
  return parallel_for(
      blocks.count(), [&] { return std::vector<float>(std::size_t(kFewTokens * blocks.width())); },
      [&](std::vector<float>& sums, std::int64_t i) {
        blocks.with_block(i, [&](std::int64_t first, std::int64_t n, const GptqColumns& block) {
          for (std::int64_t token = 0; token < tokens; token += kFewTokens) {
            const std::int64_t some = std::min(kFewTokens, tokens - token);
            kernels().gptq_columns(block, x + token * d.in, d.in, some, sums.data());
            for (std::int64_t t = 0; t < some; ++t)
              for (std::int64_t column = 0; column < n; column += d.rows_of_output) {
                const std::int64_t o = (first + column) / d.rows_of_output;
                y[(token + t) * d.out + o] = finish(token + t, o, sums.data() + t * block.columns + column, 1);
              }
          }
        });
      });
}

/// Multiplies an fp8 matrix row by row: each is dequantised once, and stays in a thread's cache for all tokens.
Status run_dots(const ops::Linear::Args& a, const Fp8Weight& fp8, std::int64_t tokens) {
  const auto d = ops::Linear::dims(a);
  const Finish<float> finish(a, d.out);
  const std::int64_t rows = d.rows_of_output;
  const float* x = a.x.as<const float>().data;
  float* y = a.y.as<float>().data;
  constexpr std::int64_t block = 16;
  return parallel_for(
      divide_up(d.out, block), [&] { return std::vector<float>(std::size_t(rows * d.in)); },
      [&](std::vector<float>& w, std::int64_t i) {
        for (std::int64_t o = i * block; o < std::min((i + 1) * block, d.out); ++o) {
          dequantise_rows(fp8, o * rows, rows, w.data());
          for (std::int64_t token = 0; token < tokens; token += kFewTokens) {
            const std::int64_t some = std::min(kFewTokens, tokens - token);
            float sums[kMostRows * kFewTokens];
            for (std::int64_t r = 0; r < rows; ++r)
              kernels().dot_f32(w.data() + r * d.in, x + token * d.in, d.in, d.in, some, sums + r * kFewTokens);
            for (std::int64_t t = 0; t < some; ++t)
              y[(token + t) * d.out + o] = finish(token + t, o, sums + t, kFewTokens);
          }
        }
      });
}

/// Rows of the weight in the arithmetic type, one after the other.
template <class Real>
void load_rows(const LinearWeight& weight, std::int64_t in, std::int64_t first, std::int64_t rows, Real* to) {
  if (const auto* gptq = std::get_if<GptqWeight>(&weight)) return dequantise_rows(*gptq, first, rows, to);
  if (const auto* packed = std::get_if<PackedWeight>(&weight)) return dequantise_rows(fp8_of(*packed), first, rows, to);
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
Status run_blocks(const ops::Linear::Args& a) {
  const auto d = ops::Linear::dims(a);
  // Each block packs x again, so blocks are large; 16 blocks keep 16 threads busy. A prompt of 512 ids takes
  // Pythia-410M 3.6 s with 64 rows a block, 2.6 to 3.1 s with up to 192 (two cores with AVX-512).
  const std::int64_t block = std::clamp<std::int64_t>(d.out / 16, 32, 192), rows_of_output = d.rows_of_output;
  const Finish<Real> finish(a, d.out);
  const Eigen::Map<const Rows<Real>> x(a.x.as<const Real>().data, d.tokens, d.in);
  Real* y = a.y.as<Real>().data;
  struct Scratch {
    Rows<Real> w, sums;
  };
  return parallel_for(
      divide_up(d.out, block), [&] { return Scratch{.w = Rows<Real>(block * rows_of_output, d.in), .sums = {}}; },
      [&](Scratch& scratch, std::int64_t i) {
        const std::int64_t first = i * block;
        const std::int64_t outputs = std::min(block, d.out - first), rows = outputs * rows_of_output;
        load_rows(a.linear.weight, d.in, first * rows_of_output, rows, scratch.w.data());
        multiply(scratch.w, rows, x, scratch.sums);
        for (std::int64_t o = 0; o < outputs; ++o)
          for (std::int64_t t = 0; t < d.tokens; ++t)
            y[t * d.out + first + o] = finish(t, first + o, &scratch.sums(o * rows_of_output, t), d.tokens);
      });
}

}  // namespace

Status run(const ops::Linear::Args& a) {
  CF_TRY(ops::Linear::check(a));
  CF_TRY(check_weight_values(ops::Linear::name, a.linear.weight));
  return with_real(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    const std::int64_t tokens = a.x.shape[0];
    if constexpr (std::is_same_v<Real, float>) {
      const auto* gptq = std::get_if<GptqWeight>(&a.linear.weight);
      if (gptq && (tokens <= kFewQuantisedTokens || Invariant::holds())) return run_dots(a, *gptq, tokens);
      if (!gptq && (tokens <= kFewTokens || Invariant::holds())) {
        if (const auto* packed = std::get_if<PackedWeight>(&a.linear.weight))
          return run_dots(a, fp8_of(*packed), tokens);
        const DenseWeight& dense = std::get<DenseWeight>(a.linear.weight);
        switch (dense.weight.dtype) {
          case DType::f16: return run_dots<f16>(a, dense, kernels().dot_f16, tokens);
          case DType::bf16: return run_dots<bf16>(a, dense, kernels().dot_bf16, tokens);
          case DType::f32: return run_dots<float>(a, dense, kernels().dot_f32, tokens);
          default: break;
        }
      }
    }
    return run_blocks<Real>(a);
  });
}

Result<Condition> condition(const ops::Linear::Args& a) {
  CF_TRY(ops::Linear::check(a));
  CF_TRY(check_weight_values(ops::Linear::name, a.linear.weight));
  const auto d = ops::Linear::dims(a);
  // The slopes of GELU and SiLU are at most these: the functions make an error larger by this factor at most.
  constexpr double gelu_slope = 1.13, silu_slope = 1.1;
  Rows<double> x(d.tokens, d.in), largest(d.out, d.tokens), result(d.out, d.tokens);
  widen_row(a.x.data, a.x.dtype, 0, x.size(), x.data());
  Array<double> bias = Array<double>::Zero(d.rows());
  if (a.linear.bias) widen_row(a.linear.bias.data, a.linear.bias.dtype, 0, d.rows(), bias.data());
  CF_TRY(parallel_for(d.out, [&](std::int64_t o) {
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
  }));
  ConditionSum sum;
  for (Eigen::Index i = 0; i < largest.size(); ++i) sum.add(largest.data()[i], result.data()[i]);
  return sum.value();
}

}  // namespace cf::cpu_ref
