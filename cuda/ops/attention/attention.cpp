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

/// What the decode kernels do not take. They take all other caches.
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

/// The rows of a kv head: its queries' heads.
std::int64_t rows_of(const ops::Attention::Dims& d, std::int64_t count) { return count * (d.heads / d.kv_heads); }

/// Where decode attention is faster.
Status check_prefill(const Arch& arch, std::int64_t count) {
  if (prefill_pays(arch, count)) return {};
  return not_taken("prompts of at least " + std::to_string(arch.tuning->prefill_queries) + " tokens",
                   std::to_string(count));
}

/// Runs of `count` queries that Hopper's tensor cores leave to others.
Status check_wgmma(const Target& target, const ops::Attention::Dims& d, std::int64_t count) {
  CF_TRY(check_prefill(target.arch, count));
  const std::int64_t rows = rows_of(d, count);
  if (!wgmma_pays(target.arch, d.head_dim, rows))
    return not_taken(
        "on Hopper head_dim up to 128 and at least " + std::to_string(kWgmmaQueryRows) + " rows of a kv head",
        "compute capability " + std::to_string(target.arch.compute_capability) + ", head_dim " +
            std::to_string(d.head_dim) + ", rows " + std::to_string(rows));
  if (!target.has_wgmma) return not_taken("a device and a build with sm_90a's instructions", "none");
  return {};
}

/// What the kernels of runs leave to others: calls that the kernels of equal runs take.
Status check_runs(const ops::Attention::Args& a) {
  CF_TRY(check_sizes(a));
  CF_TRY(check_16_bits(a));
  if (a.runs.empty() && check_cache(a)) return not_taken("runs that differ, pages or a window", "none of them");
  return check_page_size(a);
}

/// A stream, or a window with sinks, which have queries of their own.
Status check_no_stream(const ops::Attention::Args& a, const ops::Attention::Dims& d) {
  if (a.window.sinks > 0) return not_taken("queries for all keys alike", "q_sinks");
  if (d.max_kv_len > d.capacity) return not_taken("caches with room for all keys", "a stream's");
  return {};
}

Status check_row_blocks(const ops::Attention::Dims& d, std::int64_t count, int block_rows) {
  const std::int64_t rows = rows_of(d, count), most = std::int64_t(kMostRowBlocks) * block_rows;
  if (rows <= most) return {};
  return Status::error(Code::unimplemented, "attention: cuda takes up to " + std::to_string(most) +
                                                " rows of a kv head, got " + std::to_string(rows));
}

std::int64_t blocks_of(const std::vector<PrefillTable>& tables) {
  std::int64_t blocks = 0;
  for (const PrefillTable& t : tables) blocks += t.blocks;
  return blocks;
}
std::int64_t runs_of(const std::vector<PrefillTable>& tables) {
  std::int64_t runs = 0;
  for (const PrefillTable& t : tables) runs += t.runs.runs;
  return runs;
}

}  // namespace

std::string to_string(const WgmmaRunsPlan& p) {
  return plan_text({{std::int64_t(p.tables.size()), "launches"},
                    {runs_of(p.tables), "runs"},
                    {blocks_of(p.tables), "blocks a kv head"},
                    {p.warpgroups, "warpgroups"},
                    {p.smem_bytes, "B of shared memory"}});
}

std::string to_string(const PrefillRunsPlan& p) {
  return plan_text({{std::int64_t(p.tables.size()), "launches"},
                    {runs_of(p.tables), "runs"},
                    {blocks_of(p.tables), "blocks a kv head"},
                    {p.smem_bytes, "B of shared memory"}});
}

WgmmaRunsPlan wgmma_runs_plan(const Arch& arch, std::int64_t head_dim, RowRuns runs, std::int64_t group,
                              std::int64_t kv_heads) {
  std::int64_t of_one = 0, of_two = 0;  // blocks
  for (const RowRun& run : runs) {
    of_one += row_blocks_of(run, group, kWgmmaQueryRows);
    of_two += row_blocks_of(run, group, 2 * kWgmmaQueryRows);
  }
  const int warpgroups = of_two * kv_heads >= arch.sm_count && 4 * of_one >= 3 * 2 * of_two ? 2 : 1;
  return {warpgroups, wgmma_plan_of(warpgroups, head_dim, 1).smem_bytes,
          prefill_tables(runs, group, warpgroups * kWgmmaQueryRows)};
}

Result<WgmmaPlan> plan_attention_wgmma(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check(a));
  CF_TRY(check_16_bits(a));
  const auto d = ops::Attention::dims(a);
  CF_TRY(check_wgmma(target, d, d.q_len));
  return wgmma_plan(target.arch, d.head_dim, rows_of(d, d.q_len), d.batch * d.kv_heads);
}

Result<WgmmaRunsPlan> plan_attention_wgmma_runs(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check_runs(a));
  const auto d = ops::Attention::dims(a);
  CF_TRY(check_no_stream(a, d));
  const std::vector<RowRun> runs = table_of(a.runs, d.batch, d.q_len);
  for (const RowRun& run : runs) {
    CF_TRY(check_wgmma(target, d, run.count));
    CF_TRY(check_row_blocks(d, run.count, kWgmmaQueryRows));
  }
  return wgmma_runs_plan(target.arch, d.head_dim, runs, d.heads / d.kv_heads, d.kv_heads);
}

Result<PrefillPlan> plan_attention_prefill(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check(a));
  CF_TRY(check_16_bits(a));
  const auto d = ops::Attention::dims(a);
  CF_TRY(check_prefill(target.arch, d.q_len));
  const int padded = padded_head_dim(d.head_dim), block_rows = prefill_rows(padded);
  return PrefillPlan{.row_blocks = int((rows_of(d, d.q_len) + block_rows - 1) / block_rows),
                     .smem_bytes = prefill_smem_bytes(padded)};
}

// A run's kernel does not depend on the runs beside it.
Result<PrefillRunsPlan> plan_attention_prefill_runs(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check_runs(a));
  const auto d = ops::Attention::dims(a);
  const int padded = padded_head_dim(d.head_dim), block_rows = prefill_runs_rows(padded);
  if (!check_no_stream(a, d) && !takes_streams(padded))
    return not_taken("streams with head_dim up to 128", std::to_string(d.head_dim));
  const std::vector<RowRun> runs = table_of(a.runs, d.batch, d.q_len);
  for (const RowRun& run : runs) {
    CF_TRY(check_prefill(target.arch, run.count));
    if (check_no_stream(a, d) && check_wgmma(target, d, run.count))
      return not_taken("runs that attention_wgmma_runs leaves", std::to_string(run.count) + " queries");
    CF_TRY(check_row_blocks(d, run.count, block_rows));
  }
  return PrefillRunsPlan{prefill_smem_bytes(padded), prefill_tables(runs, d.heads / d.kv_heads, block_rows)};
}

Result<AttentionPlan> plan_attention_decode(const Target& target, const ops::Attention::Args& a) {
  CF_TRY(check_equal_runs(a));
  CF_TRY(check_decode(a));
  CF_TRY(check_16_bits(a));
  if (target.arch.tuning->is_invariant()) return not_taken("classes of step sizes", "one class");
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
  // The number of splits depends on the step's queries.
  if (target.arch.tuning->is_invariant()) return FloatAttentionPlan{.splits = 1};
  return FloatAttentionPlan{.splits = attention_plan(target.arch, ops::Attention::dims(a), DType::f32).splits};
}

Result<TableLaunches<FloatAttentionPlan>> plan_attention_f32_runs(const Target& target, const ops::Attention::Args& a) {
  CF_TRY_ASSIGN(const ops::Attention::Dims d, decode_runs_dims(target.arch, a));
  return TableLaunches<FloatAttentionPlan>{{.splits = attention_plan(target.arch, d, DType::f32).splits},
                                           run_tables(a.runs)};
}

}  // namespace cf::cuda
