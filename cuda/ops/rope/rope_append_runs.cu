#include "cuda/ops/any_cache.hpp"
#include "cuda/ops/rope/rope_append.cuh"
#include "cuda/ops/run_table.hpp"

namespace cf::cuda {
namespace {

/// As in rope_append.cu, for a row of a run and a cache of any kind. The cache's tensors are `matrices` stacked ones: a
/// page outside them is not written.
template <class T>
struct RowsOfRun {
  const RopeInput& in;
  const AppendOutput& out;
  const AnyCacheView& cache;
  long matrices;
  RunTable::Run run;
  int kv_len = 0;

  /// The stores of keys and values wait for kv_len: its load comes first.
  __device__ void begin(long) { kv_len = out.kv_len[run.sequence]; }
  __device__ HeadRows<T> of(long token, int part, int head) const {
    if (part == 0) return token_rows<T>(out.q, token, head, in.heads, in.head_dim);
    const int entry = cache.appended_entry(kv_len, run.count, int(token) - run.first_row);
    if (entry < 0) return {nullptr, 0};
    const AnyCacheView::MatrixRow at = cache.matrix_row(run.sequence, head, entry);
    if (at.matrix < 0 || at.matrix >= matrices) return {nullptr, 0};
    T* const first = static_cast<T*>(part == 1 ? out.k_cache : out.v_cache);
    return rows_in(first, at, cache.head_stride(), in.head_dim);
  }
};

template <class T, int Heads, ops::QkvLayout Layout>
__global__ void __launch_bounds__(kTokenThreads, rope_blocks_per_sm(Heads))
    rope_append_runs_kernel(const __grid_constant__ RopeInput in, const __grid_constant__ AppendOutput out,
                            const __grid_constant__ RopePlan plan, const __grid_constant__ RunTable table,
                            const __grid_constant__ AnyCacheView cache, long matrices) {
  const int token = table.first_row() + int(blockIdx.x);
  rope_unit<T, Heads, Layout>(in, plan, token, RowsOfRun<T>{in, out, cache, matrices, table.run[table.of_row(token)]});
}

}  // namespace

Status launch_rope_append_runs(const ops::RopeAppend::Args& a, const TableLaunches<RopePlan>& all,
                               LaunchList& launches) {
  const AnyCacheView cache(a.k_cache, a.page_table, {});
  for (const RunTable& table : all.tables)
    CF_TRY(launch_rope_of(a, all.plan, table.rows(), [&](auto zero, auto layout, const LaunchShape& shape) {
      using T = decltype(zero);
      constexpr ops::QkvLayout kLayout = decltype(layout)::value;
      return launch(
          ops::RopeAppend::name, launches, shape,
          all.plan.heads == 1 ? rope_append_runs_kernel<T, 1, kLayout> : rope_append_runs_kernel<T, 4, kLayout>,
          rope_input(a), append_output(a), all.plan, table, cache, long(cache.matrices(a.k_cache.shape[0])));
    }));
  return {};
}

}  // namespace cf::cuda
