#include "cuda/ops/attention/decode.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {

Status prepare(const ops::Attention::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

AttentionCall attention_call(const ops::Attention::Args& a) {
  const auto d = ops::Attention::dims(a);
  return {.q = a.q.data,
          .k_cache = a.k_cache.data,
          .v_cache = a.v_cache.data,
          .kv_len = a.kv_len.data,
          .y = a.y.data,
          .scale = float(a.scale),
          .q_len = int(d.q_len),
          .heads = int(d.heads),
          .head_dim = int(d.head_dim),
          .group = HeadGroup(d.heads / d.kv_heads),
          .cache = CacheView(a.k_cache)};
}

Status launch_attention_f32(const ops::Attention::Args& a, const FloatAttentionPlan& plan, LaunchList& launches) {
  if (needs_any_cache(a)) return launch_any_float(a, plan, launches);
  const auto d = ops::Attention::dims(a);
  return launch_float({d.batch, d.q_len}, DecodeCall{attention_call(a)}, plan, launches);
}

Status launch_attention_decode(const ops::Attention::Args& a, const AttentionPlan& plan, LaunchList& launches) {
  if (needs_any_cache(a)) return launch_any_decode(a, plan, launches);
  const auto d = ops::Attention::dims(a);
  return launch_decode({d.batch, d.q_len}, a.q.dtype, DecodeCall{attention_call(a)}, plan, launches);
}

}  // namespace cf::cuda
