#include "cuda/ops/attention/kv_append.hpp"

#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {
namespace {

Result<TokenPlan> plan_of(const ops::KvAppend::Args& a) {
  const auto d = ops::KvAppend::dims(a);
  CF_TRY(check_multiple_of_8(ops::KvAppend::name, "head_dim", d.head_dim));
  return token_plan(d.kv_heads * d.head_dim * std::int64_t(size_bytes(a.k.dtype)) / 16);
}

}  // namespace

Result<TokenPlan> plan_kv_append(const Target&, const ops::KvAppend::Args& a) {
  CF_TRY(check_cache(a));
  CF_TRY(check_equal_runs(a));
  return plan_of(a);
}

Result<TableLaunches<TokenPlan>> plan_kv_append_runs(const Target&, const ops::KvAppend::Args& a) {
  CF_TRY_ASSIGN(const TokenPlan plan, plan_of(a));
  const auto d = ops::KvAppend::dims(a);
  return TableLaunches<TokenPlan>{plan, run_tables(table_of(a.runs, d.batch, d.q_len))};
}

}  // namespace cf::cuda
