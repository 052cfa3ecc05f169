#include "cuda/ops/attention/attention.hpp"

#include "cuda/ops/any_cache.hpp"
#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = ops::Attention::name;

/// What no kernel takes.
Status check_sizes(const ops::Attention::Args& a) {
  const std::int64_t head_dim = a.q.shape[2];
  CF_TRY(check_multiple_of_8(kName, "head_dim", head_dim));
  if (head_dim > kMaxHeadDim)
    return Status::error(Code::unimplemented, "attention: cuda takes head_dim up to " + std::to_string(kMaxHeadDim) +
                                                  ", got " + std::to_string(head_dim));
  return check_activation(kName, a.q.dtype);
}

/// What no kernel takes that has as many queries of each sequence, and one contiguous cache of all keys.
Status check(const ops::Attention::Args& a) {
  CF_TRY(check_cache(a));
  CF_TRY(check_equal_runs(a));
  return check_sizes(a);
}

Status check_page_size(const ops::Attention::Args& a) {
  const std::int64_t entries = page_sizes(a).page_entries;
  if (!a.page_table || is_page_size(entries)) return {};
  return Status::error(Code::unimplemented, "attention: cuda takes pages of a multiple of " +
                                                std::to_string(kPageUnit) + " entries up to " +
                                                std::to_string(kMostPageEntries) + ", got " + std::to_string(entries));
}

/// What the decode kernels do not take: all else about a cache they do.
Status check_decode(const ops::Attention::Args& a) {
  CF_TRY(check_sizes(a));
  return check_page_size(a);
}

/// The sizes by which decode attention plans one launch for runs, all of which have fewer queries than a prefill's.
Result<ops::Attention::Dims> decode_runs_dims(const Arch& arch, const ops::Attention::Args& a) {
  CF_TRY(check_decode(a));
  if (a.runs.empty()) return not_taken("runs that differ", "as many queries of each sequence");
  ops::Attention::Dims d = ops::Attention::dims(a);
  d.batch = 0;
  d.q_len = 1;
  for (const RowRun& run : a.runs) {
    if (prefill_pays(arch, run.count))
      return not_taken("runs of fewer than " + std::to_string(arch.tuning->prefill_queries) + " queries",
                       std::to_string(run.count));
    d.batch += run.count;
  }
  return d;
}

Status check_16_bits(const ops::Attention::Args& a) {
  if (size_bytes(a.q.dtype) == 2) return {};
  return not_taken("activations of 16 bits", std::string(to_string(a.q.dtype)));
}

/// Where decode attention is faster, or the activations have 32 bits.
Status check_prefill(const Arch& arch, const ops::Attention::Args& a, const ops::Attention::Dims& d) {
  CF_TRY(check_16_bits(a));
  if (prefill_pays(arch, d.q_len)) return {};
  return not_taken("prompts of at least " + std::to_string(arch.tuning->prefill_queries) + " tokens",
                   std::to_string(d.q_len));
}

/// The rows of a kv head: its queries' heads.
std::int64_t rows_of(const ops::Attention::Dims& d) { return d.q_len * (d.heads / d.kv_heads); }

}  // namespace

Result<WgmmaPlan> plan_attention_wgmma(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check(a));
  const auto d = ops::Attention::dims(a);
  CF_TRY(check_prefill(target.arch, a, d));
  const std::int64_t rows = rows_of(d);
  if (!wgmma_pays(target.arch, d.head_dim, rows))
    return not_taken(
        "on Hopper head_dim up to 128 and at least " + std::to_string(kWgmmaQueryRows) + " rows of a kv head",
        "compute capability " + std::to_string(target.arch.compute_capability) + ", head_dim " +
            std::to_string(d.head_dim) + ", rows " + std::to_string(rows));
  if (!target.has_wgmma) return not_taken("a device and a build with sm_90a's instructions", "none");
  return wgmma_plan(target.arch, d.head_dim, rows, d.batch * d.kv_heads);
}

Result<PrefillPlan> plan_attention_prefill(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check(a));
  const auto d = ops::Attention::dims(a);
  CF_TRY(check_prefill(target.arch, a, d));
  const int padded = padded_head_dim(d.head_dim), block_rows = prefill_rows(padded);
  return PrefillPlan{.row_blocks = int((rows_of(d) + block_rows - 1) / block_rows),
                     .smem_bytes = prefill_smem_bytes(padded)};
}

Result<AttentionPlan> plan_attention_decode(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check_equal_runs(a));
  CF_TRY(check_decode(a));
  CF_TRY(check_16_bits(a));
  return attention_plan(target.arch, ops::Attention::dims(a), a.q.dtype);
}

Result<TableLaunches<AttentionPlan>> plan_attention_decode_runs(const Target& target, const ops::Attention::Args& a) {
  CF_TRY_ASSIGN(const ops::Attention::Dims d, decode_runs_dims(target.arch, a));
  CF_TRY(check_16_bits(a));
  return TableLaunches<AttentionPlan>{attention_plan(target.arch, d, a.q.dtype), run_tables(a.runs)};
}

Result<FloatAttentionPlan> plan_attention_f32(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check_equal_runs(a));
  CF_TRY(check_decode(a));
  return FloatAttentionPlan{.splits = attention_plan(target.arch, ops::Attention::dims(a), DType::f32).splits};
}

Result<TableLaunches<FloatAttentionPlan>> plan_attention_f32_runs(const Target& target, const ops::Attention::Args& a) {
  CF_TRY_ASSIGN(const ops::Attention::Dims d, decode_runs_dims(target.arch, a));
  return TableLaunches<FloatAttentionPlan>{{.splits = attention_plan(target.arch, d, DType::f32).splits},
                                           run_tables(a.runs)};
}

}  // namespace cf::cuda
