#pragma once
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/run_table.hpp"
#include "cuda/ops/token_plan.hpp"

namespace cf::cuda {

/// A thread takes 16 bytes of a token's keys. Both refuse a head_dim that is no multiple of 8. kv_append takes as many
/// tokens of each sequence to a contiguous cache, kv_append_runs runs of any counts to a cache of any kind.
Result<TokenPlan> plan_kv_append(const Target&, const ops::KvAppend::Args&);
Result<TableLaunches<TokenPlan>> plan_kv_append_runs(const Target&, const ops::KvAppend::Args&);
Status launch_kv_append(const ops::KvAppend::Args&, const TokenPlan&, LaunchList&);
Status launch_kv_append_runs(const ops::KvAppend::Args&, const TableLaunches<TokenPlan>&, LaunchList&);

}  // namespace cf::cuda
