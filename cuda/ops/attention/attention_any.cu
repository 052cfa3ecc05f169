// Decode attention for what attention.cu's kernels do not take: caches in pages, windows, sinks and streams.
#include "cuda/ops/attention/decode.cuh"

namespace cf::cuda {

AnyDecodeCall any_decode_call(const ops::Attention::Args& a) {
  const bool streams = a.max_kv_len > cache_capacity(a);
  const AnyCacheView view(a.k_cache, a.page_table, streams ? a.window : KeyWindow{});
  return {{attention_call(a)}, view, a.q_sinks.data, a.window, int(a.k_cache.shape[0])};
}

Status launch_any_float(const ops::Attention::Args& a, const FloatAttentionPlan& plan, LaunchList& launches) {
  const auto d = ops::Attention::dims(a);
  return launch_float({d.batch, d.q_len}, any_decode_call(a), plan, launches);
}

Status launch_any_decode(const ops::Attention::Args& a, const AttentionPlan& plan, LaunchList& launches) {
  const auto d = ops::Attention::dims(a);
  return launch_decode({d.batch, d.q_len}, a.q.dtype, any_decode_call(a), plan, launches);
}

}  // namespace cf::cuda
