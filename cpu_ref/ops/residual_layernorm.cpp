#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/norm.hpp"
#include "cpu_ref/ops/parallel.hpp"

namespace cf::cpu_ref {

Status run(const ops::ResidualLayerNorm::Args& a) {
  CF_TRY(ops::ResidualLayerNorm::check(a));
  const auto d = ops::ResidualLayerNorm::dims(a);
  return with_real(ops::ResidualLayerNorm::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    using Row = Eigen::Map<Array<Real>>;
    using ConstRow = Eigen::Map<const Array<Real>>;
    const RowNorm<Real> norm(a.norm, d.hidden, a.eps);
    return parallel_for(d.tokens, [&](std::int64_t t) {
      const std::int64_t row = t * d.hidden;
      Row h(a.h.as<Real>().data + row, d.hidden);
      h = ConstRow(a.x.as<const Real>().data + row, d.hidden) + ConstRow(a.a.as<const Real>().data + row, d.hidden) +
          ConstRow(a.b.as<const Real>().data + row, d.hidden);
      Row(a.y.as<Real>().data + row, d.hidden) = norm(h);
    });
  });
}

/// y's condition: that of the norm, scaled by the cancellation in the sum that the norm reads.
Result<Condition> condition(const ops::ResidualLayerNorm::Args& a) {
  CF_TRY(ops::ResidualLayerNorm::check(a));
  const auto d = ops::ResidualLayerNorm::dims(a);
  const RowNorm<double> norm(a.norm, d.hidden, a.eps);
  const Array<double> nothing = Array<double>::Zero(d.hidden);
  Array<double> h(d.hidden), part(d.hidden), terms(d.hidden);
  ConditionSum norm_sum, residual_sum;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    h.setZero();
    terms.setZero();
    for (const ConstAnyView<2>* v : {&a.x, &a.a, &a.b}) {
      widen_row(v->data, v->dtype, t * d.hidden, d.hidden, part.data());
      h += part;
      terms += part.abs();
    }
    for (std::int64_t i = 0; i < d.hidden; ++i) residual_sum.add(terms[i], h[i]);
    norm.add_condition(h, nothing, norm_sum);
  }
  const Condition n = norm_sum.value(), r = residual_sum.value();
  return Condition{n.l2 * r.l2, n.max * r.max};
}

}  // namespace cf::cpu_ref
