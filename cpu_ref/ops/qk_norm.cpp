#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/ops/rms.hpp"
#include "cpu_ref/ops/widen.hpp"

namespace cf::cpu_ref {

Status run(const ops::QkNorm::Args& a) {
  CF_TRY(ops::QkNorm::check(a));
  const auto d = ops::QkNorm::dims(a);
  return with_real(ops::QkNorm::name, a.qkv.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    Array<Real> gammas[2] = {Array<Real>(d.head_dim), Array<Real>(d.head_dim)};
    widen_row(a.q_gamma.data, a.q_gamma.dtype, 0, d.head_dim, gammas[0].data());
    widen_row(a.k_gamma.data, a.k_gamma.dtype, 0, d.head_dim, gammas[1].data());
    const Real* from = a.qkv.as<const Real>().data;
    Real* to = a.y.as<Real>().data;
    return parallel_for(d.tokens, [&](std::int64_t t) {
      for (int part = 0; part < 3; ++part)
        for (std::int64_t h = 0; h < (part == 0 ? d.heads : d.kv_heads); ++h) {
          const std::int64_t at = (t * (d.heads + 2 * d.kv_heads) + d.qkv().index(part, h)) * d.head_dim;
          const Eigen::Map<const Array<Real>> x(from + at, d.head_dim);
          Eigen::Map<Array<Real>> y(to + at, d.head_dim);
          if (part == 2)
            y = x;
          else
            y = x * inverse_rms<Real>(x, a.eps) * gammas[part];
        }
    });
  });
}

/// That of RmsNorm with rows of head_dim.
Result<Condition> condition(const ops::QkNorm::Args& a) {
  CF_TRY(ops::QkNorm::check(a));
  return rms_condition(a.qkv.shape[3]);
}

}  // namespace cf::cpu_ref
