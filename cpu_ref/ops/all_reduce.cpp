#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/norm.hpp"
#include "cpu_ref/ops/parallel.hpp"

namespace cf::cpu_ref {

Status run(const ops::AllReduce::Args& a) {
  CF_TRY(ops::AllReduce::check(a));
  const auto d = ops::AllReduce::dims(a);
  if (d.parts != d.ranks)
    return Status::error(Code::unimplemented, std::string(ops::AllReduce::name) + ": cpu_ref takes the parts of all " +
                                                  std::to_string(d.ranks) + " ranks, got this rank's alone");
  return with_real(ops::AllReduce::name, a.x.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    const Real* const x = a.x.as<const Real>().data;
    Real* const y = a.y.as<Real>().data;
    return parallel_for(d.tokens, [&](std::int64_t t) {
      for (std::int64_t i = t * d.width; i < (t + 1) * d.width; ++i) {
        Real sum = x[i];
        for (std::int64_t r = 1; r < d.ranks; ++r) sum += x[r * d.tokens * d.width + i];
        y[i] = sum;
      }
    });
  });
}

/// The partial sums are at most the sum of the parts' sizes.
Result<Condition> condition(const ops::AllReduce::Args& a) {
  CF_TRY(ops::AllReduce::check(a));
  const auto d = ops::AllReduce::dims(a);
  const std::int64_t size = d.tokens * d.width;
  Array<double> part(size), sum = Array<double>::Zero(size), terms = Array<double>::Zero(size);
  for (std::int64_t r = 0; r < d.parts; ++r) {
    widen_row(a.x.data, a.x.dtype, r * size, size, part.data());
    sum += part;
    terms += part.abs();
  }
  ConditionSum total;
  for (std::int64_t i = 0; i < size; ++i) total.add(terms[i], sum[i]);
  return total.value();
}

}  // namespace cf::cpu_ref
