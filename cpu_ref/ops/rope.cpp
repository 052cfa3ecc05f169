#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {

Status run(const ops::Rope::Args& a) {
  CF_TRY(ops::Rope::check(a));
  const auto d = ops::Rope::dims(a);
  CF_TRY(check_index(ops::Rope::name, "positions", a.positions, 0, d.table_rows - 1));
  const std::int64_t half = d.rotary_dim / 2;
  return with_real(ops::Rope::name, a.qkv.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    const Real* qkv = a.qkv.as<const Real>().data;
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      const float* cos = a.cos.data + a.positions.data[t] * half;
      const float* sin = a.sin.data + a.positions.data[t] * half;
      const auto turn = [&](const Real* x, Real* y) {
        for (std::int64_t i = 0; i < half; ++i) {
          y[i] = x[i] * Real(cos[i]) - x[i + half] * Real(sin[i]);
          y[i + half] = x[i + half] * Real(cos[i]) + x[i] * Real(sin[i]);
        }
        std::copy(x + d.rotary_dim, x + d.head_dim, y + d.rotary_dim);
      };
      for (std::int64_t h = 0; h < d.heads; ++h) {
        const std::int64_t row = (t * d.heads + h) * d.head_dim;
        const Real* x = qkv + 3 * row;
        turn(x, a.q.as<Real>().data + row);
        turn(x + d.head_dim, a.k.as<Real>().data + row);
        std::copy(x + 2 * d.head_dim, x + 3 * d.head_dim, a.v.as<Real>().data + row);
      }
    }
    return {};
  });
}

/// A rotation keeps the length of a pair, and the magnitudes of the two products of an element sum to at most sqrt(2)
/// times that length.
Result<Condition> condition(const ops::Rope::Args& a) {
  CF_TRY(ops::Rope::check(a));
  return Condition{std::sqrt(2.0), std::sqrt(2.0)};
}

}  // namespace cf::cpu_ref
