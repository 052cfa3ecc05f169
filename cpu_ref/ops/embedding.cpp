#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/widen.hpp"

namespace cf::cpu_ref {

Status run(const ops::Embedding::Args& a) {
  CF_TRY(ops::Embedding::check(a));
  const auto [tokens, vocab, hidden] = ops::Embedding::dims(a);
  CF_TRY(check_index(ops::Embedding::name, "ids", a.ids, 0, vocab - 1));
  return with_real(ops::Embedding::name, a.y.dtype, [&, tokens = tokens, hidden = hidden](auto zero) -> Status {
    using Real = decltype(zero);
    Real* y = a.y.as<Real>().data;
    for (std::int64_t t = 0; t < tokens; ++t)
      widen_row(a.table.data, a.table.dtype, a.ids.data[t] * hidden, hidden, y + t * hidden);
    return {};
  });
}

/// A copy sums nothing.
Result<Condition> condition(const ops::Embedding::Args& a) {
  CF_TRY(ops::Embedding::check(a));
  return Condition{};
}

}  // namespace cf::cpu_ref
