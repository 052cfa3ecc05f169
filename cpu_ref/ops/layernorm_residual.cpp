#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/norm.hpp"
#include "cpu_ref/ops/parallel.hpp"

namespace cf::cpu_ref {

Status run(const ops::LayerNormResidual::Args& a) {
  CF_TRY(ops::LayerNormResidual::check(a));
  const auto d = ops::LayerNormResidual::dims(a);
  return with_real(ops::LayerNormResidual::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    using ConstRow = Eigen::Map<const Array<Real>>;
    const RowNorm<Real> norm(a.norm, d.hidden, a.eps);
    return parallel_for(d.tokens, [&](std::int64_t t) {
      const std::int64_t row = t * d.hidden;
      Eigen::Map<Array<Real>>(a.y.as<Real>().data + row, d.hidden) =
          norm(ConstRow(a.x.as<const Real>().data + row, d.hidden)) +
          ConstRow(a.residual.as<const Real>().data + row, d.hidden);
    });
  });
}

Result<Condition> condition(const ops::LayerNormResidual::Args& a) {
  CF_TRY(ops::LayerNormResidual::check(a));
  const auto d = ops::LayerNormResidual::dims(a);
  const RowNorm<double> norm(a.norm, d.hidden, a.eps);
  Array<double> x(d.hidden), residual(d.hidden);
  ConditionSum sum;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    widen_row(a.x.data, a.x.dtype, t * d.hidden, d.hidden, x.data());
    widen_row(a.residual.data, a.residual.dtype, t * d.hidden, d.hidden, residual.data());
    norm.add_condition(x, residual, sum);
  }
  return sum.value();
}

}  // namespace cf::cpu_ref
