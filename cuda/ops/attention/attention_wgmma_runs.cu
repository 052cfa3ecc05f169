#include "cuda/ops/attention/attention_wgmma.cuh"

namespace cf::cuda {

Status launch_attention_wgmma_runs(const ops::Attention::Args& a, const WgmmaRunsPlan& plan, LaunchList& launches) {
  for (const PrefillTable& table : plan.tables)
    CF_TRY(
        launch_wgmma_prefill(a, prefill_call(a, table), plan.warpgroups, plan.smem_bytes, table.blocks, 1, launches));
  return {};
}

}  // namespace cf::cuda
