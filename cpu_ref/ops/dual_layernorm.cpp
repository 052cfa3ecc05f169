#include <algorithm>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/norm.hpp"
#include "cpu_ref/ops/parallel.hpp"

namespace cf::cpu_ref {

Status run(const ops::DualLayerNorm::Args& a) {
  CF_TRY(ops::DualLayerNorm::check(a));
  const auto d = ops::DualLayerNorm::dims(a);
  return with_real(ops::DualLayerNorm::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    using Row = Eigen::Map<Array<Real>>;
    const RowNorm<Real> norm1(a.norm1, d.hidden, a.eps), norm2(a.norm2, d.hidden, a.eps);
    return parallel_for(d.tokens, [&](std::int64_t t) {
      const std::int64_t row = t * d.hidden;
      const Eigen::Map<const Array<Real>> x(a.x.as<const Real>().data + row, d.hidden);
      Row(a.y1.as<Real>().data + row, d.hidden) = norm1(x);
      Row(a.y2.as<Real>().data + row, d.hidden) = norm2(x);
    });
  });
}

/// The larger of the two outputs' conditions.
Result<Condition> condition(const ops::DualLayerNorm::Args& a) {
  const auto of = [&](const NormParams& norm, AnyView<2> y) {
    return condition(ops::LayerNorm::Args{.x = a.x, .norm = norm, .y = y, .eps = a.eps});
  };
  CF_TRY(ops::DualLayerNorm::check(a));
  CF_TRY_ASSIGN(const Condition one, of(a.norm1, a.y1));
  CF_TRY_ASSIGN(const Condition two, of(a.norm2, a.y2));
  return Condition{std::max(one.l2, two.l2), std::max(one.max, two.max)};
}

}  // namespace cf::cpu_ref
