#include "cuda/ops/rms_linear/rms_linear.hpp"

namespace cf::cuda {
namespace {

/// The plan for a weight whose rows are in the order of `pairs`.
GptqPlan plan_of(const Arch& arch, const ops::RmsNorm::Args& norm, const ops::Linear::Args& linear,
                 const RopePairs& pairs) {
  const auto& [tokens, hidden] = norm.x.shape;
  const auto* const weight = std::get_if<PackedWeight>(&linear.linear.weight);
  const DType dtype = norm.x.dtype;
  if (!weight || linear.x.data != norm.y.data || linear.x.shape != norm.x.shape || tokens != 1 || hidden % 8 ||
      size_bytes(dtype) != 2 || norm.gamma.dtype != dtype || linear.x.dtype != dtype || linear.y.dtype != dtype ||
      layernorm_plan(arch, tokens, hidden, 1).elements != 8)
    return {};
  const Result<GptqLayout> layout = gptq_layout(RmsLinear::name, *weight);
  if (!layout || !gptq_is_plain(linear, *layout, pairs, kRmsRows)) return {};
  const GptqSizes sizes = gptq_sizes(*layout, tokens);
  if (!sizes.one_token) return {};
  // One stage is requested early, with many tiles, too: the loads of the token, for which all warps wait, queue behind
  // early stages.
  return gptq_plan(arch, sizes, tokens, kLinearGptqTurns, kLinearGptqBlocksPerSm, {.bytes = kRmsStaticBytes},
                   arch.tuning->packed_ahead);
}

}  // namespace

GptqPlan rms_linear_plan(const Arch& arch, const RmsLinear::Args& a) { return plan_of(arch, a.norm, a.linear, {}); }

GptqPlan rms_qkv_plan(const Arch& arch, const RmsQkv::Args& a) {
  if (a.rope.layout != ops::QkvLayout::separate || a.rope.qkv.data != a.linear.y.data ||
      a.linear.epilogue != ops::Epilogue::none || a.rope.q.dtype != a.linear.y.dtype)
    return {};
  const auto d = ops::RopeAppend::dims(a.rope);
  const bool fits = d.tokens() == 1 && a.linear.y.shape[1] == (d.heads + 2 * d.kv_heads) * d.head_dim;
  if (!fits || d.head_dim % 8) return {};
  return plan_of(arch, a.norm, a.linear, rope_pairs(d.qkv(), d.head_dim, d.rotary_dim));
}

}  // namespace cf::cuda
