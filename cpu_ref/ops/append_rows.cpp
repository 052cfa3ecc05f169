#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {

Status run(const ops::AppendRows::Args& a) {
  CF_TRY(ops::AppendRows::check(a));
  // Checked before anything is written.
  if (const std::int32_t n = a.append.kv_len.data[0]; n != a.rows.last + 1)
    return bad_argument(ops::AppendRows::name, "'kv_len'[0] must be last + 1 = " + std::to_string(a.rows.last + 1) +
                                                   ", got " + std::to_string(n));
  return ops::AppendRows::for_each_part(a, [](const auto& args) { return run(args); });
}

/// A copy sums nothing.
Result<Condition> condition(const ops::AppendRows::Args& a) {
  CF_TRY(ops::AppendRows::check(a));
  return Condition{};
}

}  // namespace cf::cpu_ref
