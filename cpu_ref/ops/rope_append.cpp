#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {
namespace {

/// Calls f with the Args of every part, on keys and values of the activations' dtype.
template <class F>
Status for_each_part(const ops::RopeAppend::Args& a, F&& f) {
  CF_TRY(ops::RopeAppend::check(a));
  const auto d = ops::RopeAppend::dims(a);
  // Checked before anything is written.
  if (d.rotary_dim > 0) CF_TRY(check_index(ops::RopeAppend::name, "positions", a.positions, 0, d.table_rows - 1));
  CF_TRY(check_append(ops::RopeAppend::name, a, d, d.capacity));
  const Shape rows{d.tokens(), d.kv_heads, d.head_dim};
  Tensor k(a.qkv.dtype, rows), v(a.qkv.dtype, rows);
  return ops::RopeAppend::for_each_part(a, k.view<3>(), v.view<3>(), f);
}

}  // namespace

Status run(const ops::RopeAppend::Args& a) {
  return for_each_part(a, [](const auto& args) { return run(args); });
}

/// Rope's: the append sums nothing.
Result<Condition> condition(const ops::RopeAppend::Args& a) {
  Condition of_rope;
  CF_TRY(for_each_part(a, [&]<class Part>(const Part& part) -> Status {
    if constexpr (std::is_same_v<Part, ops::Rope::Args>) {
      CF_TRY_ASSIGN(of_rope, condition(part));
    }
    return {};
  }));
  return of_rope;
}

}  // namespace cf::cpu_ref
