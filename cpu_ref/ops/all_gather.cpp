#include <cstring>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/parallel.hpp"

namespace cf::cpu_ref {

Status run(const ops::AllGather::Args& a) {
  CF_TRY(ops::AllGather::check(a));
  const auto d = ops::AllGather::dims(a);
  if (d.parts != d.ranks)
    return Status::error(Code::unimplemented, std::string(ops::AllGather::name) + ": cpu_ref takes the parts of all " +
                                                  std::to_string(d.ranks) + " ranks, got this rank's alone");
  const std::int64_t row_bytes = d.width * std::int64_t(size_bytes(a.x.dtype));
  const auto* const x = static_cast<const std::byte*>(a.x.data);
  auto* const y = static_cast<std::byte*>(a.y.data);
  return parallel_for(d.tokens, [&](std::int64_t t) {
    for (std::int64_t r = 0; r < d.ranks; ++r)
      std::memcpy(y + (t * d.ranks + r) * row_bytes, x + (r * d.tokens + t) * row_bytes, std::size_t(row_bytes));
  });
}

/// A copy sums nothing.
Result<Condition> condition(const ops::AllGather::Args& a) {
  CF_TRY(ops::AllGather::check(a));
  return Condition{};
}

}  // namespace cf::cpu_ref
