#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/norm.hpp"
#include "cpu_ref/ops/parallel.hpp"

namespace cf::cpu_ref {

Status run(const ops::LayerNorm::Args& a) {
  CF_TRY(ops::LayerNorm::check(a));
  const auto d = ops::LayerNorm::dims(a);
  return with_real(ops::LayerNorm::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    using Row = Eigen::Map<Array<Real>>;
    using ConstRow = Eigen::Map<const Array<Real>>;
    const RowNorm<Real> norm(a.norm, d.hidden, a.eps);
    const Real* x = a.x.as<const Real>().data;
    Real* y = a.y.as<Real>().data;
    return parallel_for(d.tokens, [&](std::int64_t t) {
      Row(y + t * d.hidden, d.hidden) = norm(ConstRow(x + t * d.hidden, d.hidden));
    });
  });
}

Result<Condition> condition(const ops::LayerNorm::Args& a) {
  CF_TRY(ops::LayerNorm::check(a));
  const auto d = ops::LayerNorm::dims(a);
  const RowNorm<double> norm(a.norm, d.hidden, a.eps);
  const Array<double> nothing = Array<double>::Zero(d.hidden);
  Array<double> x(d.hidden);
  ConditionSum sum;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    widen_row(a.x.data, a.x.dtype, t * d.hidden, d.hidden, x.data());
    norm.add_condition(x, nothing, sum);
  }
  return sum.value();
}

}  // namespace cf::cpu_ref
