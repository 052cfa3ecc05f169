#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/widen.hpp"

namespace cf::cpu_ref {
namespace {

template <class Real>
Real inverse_rms(const Eigen::Ref<const Array<Real>>& x, double eps) {
  return 1 / std::sqrt(x.square().mean() + Real(eps));
}

}  // namespace

Status run(const ops::RmsNorm::Args& a) {
  CF_TRY(ops::RmsNorm::check(a));
  const auto d = ops::RmsNorm::dims(a);
  return with_real(ops::RmsNorm::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    Array<Real> gamma(d.hidden);
    widen_row(a.gamma.data, a.gamma.dtype, 0, d.hidden, gamma.data());
    const Real* rows = a.x.as<const Real>().data;
    Real* y = a.y.as<Real>().data;
    return parallel_for(d.tokens, [&](std::int64_t t) {
      const Eigen::Map<const Array<Real>> x(rows + t * d.hidden, d.hidden);
      Eigen::Map<Array<Real>>(y + t * d.hidden, d.hidden) = x * inverse_rms<Real>(x, a.eps) * gamma;
    });
  });
}

/// No sum cancels: squares are positive. The root halves the relative error of the sum of squares, of its division by
/// hidden and of the sum with eps. The root, its reciprocal and the products with x and gamma round once each. The
/// budget multiplies a condition by sqrt(hidden), so these five roundings are divided by that.
Result<Condition> condition(const ops::RmsNorm::Args& a) {
  CF_TRY(ops::RmsNorm::check(a));
  const double c = std::max(1.0, 0.5 + 5 / std::sqrt(double(ops::RmsNorm::dims(a).hidden)));
  return Condition{c, c};
}

}  // namespace cf::cpu_ref
