#pragma once
#include "core/weights.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/widen.hpp"

namespace cf::cpu_ref {

/// The LayerNorm of one row at a time, with gamma and beta widened once. The first pass makes the mean, the second the
/// mean square of x - mean. Two passes are as accurate as Welford's one.
template <class Real>
class RowNorm {
 public:
  RowNorm(const NormParams& norm, std::int64_t hidden, double eps) : gamma_(hidden), beta_(hidden), eps_(Real(eps)) {
    widen_row(norm.gamma.data, norm.gamma.dtype, 0, hidden, gamma_.data());
    widen_row(norm.beta.data, norm.beta.dtype, 0, hidden, beta_.data());
  }

  Array<Real> operator()(const Eigen::Ref<const Array<Real>>& x) const {
    const Array<Real> centred = x - x.mean();
    const Real rstd = 1 / std::sqrt(centred.square().mean() + eps_);
    return centred * rstd * gamma_ + beta_;
  }

  /// Adds a row's terms and results to the condition. The mean's rounding error is proportional to x, and in the output
  /// to x / deviation.
  void add_condition(const Eigen::Ref<const Array<Real>>& x, const Array<Real>& addend, ConditionSum& sum) const {
    const Real mean = x.mean(), rstd = 1 / std::sqrt((x - mean).square().mean() + eps_);
    const Array<Real> y = (x - mean) * rstd * gamma_ + beta_ + addend;
    const Real size = std::sqrt(x.square().mean()) * rstd;
    const Array<Real> terms = ((x.abs() + std::abs(mean)) * rstd + size) * gamma_.abs() + beta_.abs() + addend.abs();
    for (Eigen::Index i = 0; i < y.size(); ++i) sum.add(double(terms[i]), double(y[i]));
  }

 private:
  Array<Real> gamma_, beta_;
  Real eps_;
};

}  // namespace cf::cpu_ref
