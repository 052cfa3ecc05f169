#include "cuda/ops/appended_row.hpp"
#include "cuda/ops/rope/rope_append.cuh"
#include "cuda/ops/run_table.hpp"

namespace cf::cuda {
namespace {

/// As in rope_append.cu, for a row of a run and a cache of any kind, whose tensors have `storages` pages or sequences.
template <class T>
struct RowsOfRun {
  const RopeInput& in;
  const AppendOutput& out;
  const AnyCacheView& cache;
  int storages;
  RunTable::Run run;
  int kv_len = 0, cache_row = 0;

  /// The stores of keys and values wait for kv_len: its load comes first.
  __device__ void begin(long) { kv_len = out.kv_len[run.sequence]; }
  __device__ void locate(long token) {
    cache_row = appended_row(cache, storages, run.sequence, kv_len, run.count, int(token) - run.first_row);
  }
  __device__ HeadRows<T> of(long token, int part, int head) const {
    if (part == 0) return token_rows<T>(out.q, token, head, in.heads, in.head_dim);
    if (cache_row < 0) return {nullptr, 0};
    T* const first = static_cast<T*>(part == 1 ? out.k_cache : out.v_cache);
    return {first + head * cache.head_stride() + long(cache_row) * in.head_dim, cache.head_stride()};
  }
};

template <class T, int Heads, ops::QkvLayout Layout>
__global__ void __launch_bounds__(kTokenThreads, rope_blocks_per_sm(Heads))
    rope_append_runs_kernel(const __grid_constant__ RopeInput in, const __grid_constant__ AppendOutput out,
                            const __grid_constant__ RopePlan plan, const __grid_constant__ RunTable table,
                            const __grid_constant__ AnyCacheView cache, int storages) {
  const int token = table.first_row() + int(blockIdx.x);
  rope_unit<T, Heads, Layout>(in, plan, token, RowsOfRun<T>{in, out, cache, storages, table.run[table.of_row(token)]});
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
          rope_input(a), append_output(a), all.plan, table, cache, int(a.k_cache.shape[0]));
    }));
  return {};
}

}  // namespace cf::cuda
