// Decode attention of runs that differ in their counts, or whose sequences do not follow each other: one launch for up
// to kMaxTableRuns of them, over caches of any kind.
#include "cuda/ops/attention/decode.cuh"

namespace cf::cuda {
namespace {

/// Calls f(call, runs) for each table of a plan.
template <class Plan, class F>
Status for_each_table(const ops::Attention::Args& a, const TableLaunches<Plan>& all, F&& f) {
  ops::Attention::Args rows = a;
  rows.runs = {};  // the plan has them, and the table need not be there any more
  RunsDecodeCall call{any_decode_call(rows), {}};
  for (const RunTable& table : all.tables) {
    call.table = table;
    call.q_len = 0;
    for (int i = 0; i < table.runs; ++i) call.q_len = std::max(call.q_len, int(table.run[i].count));
    CF_TRY(f(call, DecodeRuns{table.runs, call.q_len}));
  }
  return {};
}

}  // namespace

Status launch_attention_f32_runs(const ops::Attention::Args& a, const TableLaunches<FloatAttentionPlan>& all,
                                 LaunchList& launches) {
  return for_each_table(a, all, [&](const RunsDecodeCall& call, const DecodeRuns& runs) {
    return launch_float(runs, call, all.plan, launches);
  });
}

Status launch_attention_decode_runs(const ops::Attention::Args& a, const TableLaunches<AttentionPlan>& all,
                                    LaunchList& launches) {
  return for_each_table(a, all, [&](const RunsDecodeCall& call, const DecodeRuns& runs) {
    return launch_decode(runs, a.q.dtype, call, all.plan, launches);
  });
}

}  // namespace cf::cuda
