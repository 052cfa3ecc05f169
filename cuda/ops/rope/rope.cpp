#include "cuda/ops/rope/rope.hpp"

#include "cuda/ops/appended_row.hpp"
#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {
namespace {

template <class Args>
Result<RopePlan> plan_of(const Target& target, const Args& a) {
  constexpr std::string_view name = Args::Op::name;
  const auto d = Args::Op::dims(a);
  CF_TRY(check_multiple_of_8(name, "head_dim", d.head_dim));
  CF_TRY(check_activation(name, a.qkv.dtype));
  return rope_plan(target.arch, a.qkv.shape[0], d.heads, d.kv_heads, d.head_dim, d.rotary_dim,
                   16 / int(size_bytes(a.qkv.dtype)));
}

}  // namespace

Result<RopePlan> plan_rope(const Target& target, const ops::Rope::Args& a) { return plan_of(target, a); }

Result<RopePlan> plan_rope_append(const Target& target, const ops::RopeAppend::Args& a) {
  CF_TRY(check_cache(a));
  CF_TRY(check_equal_runs(a));
  return plan_of(target, a);
}

Result<TableLaunches<RopePlan>> plan_rope_append_runs(const Target& target, const ops::RopeAppend::Args& a) {
  CF_TRY(check_cache_rows(a));
  CF_TRY_ASSIGN(const RopePlan plan, plan_of(target, a));
  const auto d = ops::RopeAppend::dims(a);
  return TableLaunches<RopePlan>{plan, run_tables(table_of(a.runs, d.batch, d.q_len))};
}

}  // namespace cf::cuda
