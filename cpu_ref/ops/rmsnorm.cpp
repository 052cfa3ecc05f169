#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/ops/rms.hpp"
#include "cpu_ref/ops/widen.hpp"

namespace cf::cpu_ref {

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

Result<Condition> condition(const ops::RmsNorm::Args& a) {
  CF_TRY(ops::RmsNorm::check(a));
  return rms_condition(ops::RmsNorm::dims(a).hidden);
}

}  // namespace cf::cpu_ref
