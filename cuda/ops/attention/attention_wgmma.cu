#include "cuda/ops/attention/attention_wgmma.cuh"

namespace cf::cuda {

Status launch_attention_wgmma(const ops::Attention::Args& a, const WgmmaPlan& plan, LaunchList& launches) {
  return launch_wgmma_prefill(a, attention_call(a), plan.warpgroups, plan.smem_bytes, plan.row_blocks,
                              a.kv_len.shape[0], launches);
}

}  // namespace cf::cuda
