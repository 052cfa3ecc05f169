#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {

Status run(const ops::Rope::Args& a) {
  CF_TRY(ops::Rope::check(a));
  const auto d = ops::Rope::dims(a);
  if (d.rotary_dim > 0) {
    CF_TRY(check_index(ops::Rope::name, "positions", a.positions, 0, d.table_rows - 1));
    if (d.sinks) CF_TRY(check_index(ops::Rope::name, "sink_positions", a.sink_positions, 0, d.table_rows - 1));
  }
  const std::int64_t half = d.rotary_dim / 2;
  return with_real(ops::Rope::name, a.qkv.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    const Real* qkv = a.qkv.as<const Real>().data;
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      const auto turn = [&](const View<const std::int32_t, 1>& positions, const Real* x, Real* y) {
        const std::int64_t row = half > 0 ? positions.data[t] * half : 0;
        const float *cos = a.cos.data + row, *sin = a.sin.data + row;
        for (std::int64_t i = 0; i < half; ++i) {
          y[i] = x[i] * Real(cos[i]) - x[i + half] * Real(sin[i]);
          y[i + half] = x[i + half] * Real(cos[i]) + x[i] * Real(sin[i]);
        }
        std::copy(x + d.rotary_dim, x + d.head_dim, y + d.rotary_dim);
      };
      const auto source = [&](int part, std::int64_t h) {
        return qkv + (t * (d.heads + 2 * d.kv_heads) + d.qkv().index(part, h)) * d.head_dim;
      };
      const auto target = [&](const AnyView<3>& to, std::int64_t h) {
        return to.as<Real>().data + (t * to.shape[1] + h) * d.head_dim;
      };
      for (std::int64_t h = 0; h < d.heads; ++h) {
        turn(a.positions, source(0, h), target(a.q, h));
        if (d.sinks) turn(a.sink_positions, source(0, h), target(a.q_sinks, h));
      }
      for (std::int64_t h = 0; h < d.kv_heads; ++h) {
        turn(a.positions, source(1, h), target(a.k, h));
        std::copy_n(source(2, h), d.head_dim, target(a.v, h));
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
