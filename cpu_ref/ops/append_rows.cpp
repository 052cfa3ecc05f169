#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {

Status run(const ops::AppendRows::Args& a) {
  CF_TRY(ops::AppendRows::check(a));
  // Checked before anything is written.
  if (const std::int32_t n = a.append.kv_len.data[0]; n != a.rows.last + 1)
    return bad_argument(ops::AppendRows::name, "'kv_len'[0] must be last + 1 = " + std::to_string(a.rows.last + 1) +
                                                   ", got " + std::to_string(n));
  if (const auto d = ops::AppendRows::dims(a); d.writes_cache()) {
    const auto first = [&](const RowRun&, std::int64_t) { return a.rows.first; };
    CF_TRY(check_pages(ops::AppendRows::name, a.append, d, table_of({}, 1, 1), {}, first,
                       [](const RowRun&, std::int32_t) { return Status(); }));
  }
  return ops::AppendRows::for_each_part(a, [](const auto& args) { return run(args); });
}

/// A copy sums nothing.
Result<Condition> condition(const ops::AppendRows::Args& a) {
  CF_TRY(ops::AppendRows::check(a));
  return Condition{};
}

}  // namespace cf::cpu_ref
