#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/widen.hpp"

namespace cf::cpu_ref {
namespace {

/// Checks a call, and calls f(token, embedding, position) with the two rows whose sum is a token's y. Without a table
/// of positions the second is zeros.
template <class F>
Status for_each_token(const ops::Embedding::Args& a, F&& f) {
  CF_TRY(ops::Embedding::check(a));
  const auto d = ops::Embedding::dims(a);
  CF_TRY(check_index(ops::Embedding::name, "ids", a.ids, 0, d.vocab - 1));
  if (d.position_rows > 0) CF_TRY(check_index(ops::Embedding::name, "positions", a.positions, 0, d.position_rows - 1));
  return with_real(ops::Embedding::name, a.y.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    Array<Real> row(d.hidden), position = Array<Real>::Zero(d.hidden);
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      widen_row(a.table.data, a.table.dtype, a.ids.data[t] * d.hidden, d.hidden, row.data());
      if (d.position_rows > 0)
        widen_row(a.position_table.data, a.position_table.dtype, a.positions.data[t] * d.hidden, d.hidden,
                  position.data());
      f(t, row, position);
    }
    return {};
  });
}

}  // namespace

Status run(const ops::Embedding::Args& a) {
  return for_each_token(a, [&]<class Real>(std::int64_t t, const Array<Real>& row, const Array<Real>& position) {
    Eigen::Map<Array<Real>>(a.y.as<Real>().data + t * row.size(), row.size()) = row + position;
  });
}

/// A copy sums nothing.
Result<Condition> condition(const ops::Embedding::Args& a) {
  ConditionSum sum;
  CF_TRY(for_each_token(a, [&]<class Real>(std::int64_t, const Array<Real>& row, const Array<Real>& position) {
    for (Eigen::Index i = 0; i < row.size(); ++i)
      sum.add(std::abs(double(row[i])) + std::abs(double(position[i])), double(row[i]) + double(position[i]));
  }));
  return a.position_table ? sum.value() : Condition{};
}

}  // namespace cf::cpu_ref
