#include "cuda/ops/attention/kv_append.hpp"

#include "core/cache_view.hpp"
#include "cuda/device/sync.cuh"
#include "cuda/ops/any_cache.hpp"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// What the kernels copy, in vectors of 16 bytes, the unit of their cache views. A row is one head's key or value.
struct Vectors {
  const uint4 *k, *v;
  const std::int32_t* kv_len;
  uint4 *k_cache, *v_cache;
  unsigned kv_heads, row_vectors;
};

Vectors vectors_of(const ops::KvAppend::Args& a, std::int64_t vector_elements) {
  return {.k = static_cast<const uint4*>(a.k.data),
          .v = static_cast<const uint4*>(a.v.data),
          .kv_len = a.kv_len.data,
          .k_cache = static_cast<uint4*>(a.k_cache.data),
          .v_cache = static_cast<uint4*>(a.v_cache.data),
          .kv_heads = unsigned(a.k.shape[1]),
          .row_vectors = unsigned(a.k.shape[2] / vector_elements)};
}

std::int64_t vector_elements_of(const ops::KvAppend::Args& a) { return 16 / std::int64_t(size_bytes(a.k.dtype)); }

/// A thread copies 16 bytes of a token's keys and the same 16 bytes of its values. A kv_len that the cache has no room
/// for writes nothing.
__global__ void __launch_bounds__(kTokenThreads)
    kv_append_kernel(const __grid_constant__ Vectors a, unsigned q_len, const __grid_constant__ CacheView cache) {
  let_successor_start();
  wait_for_predecessors();
  // The stores need kv_len, so its load comes first. A decode step computes its address without a division.
  const unsigned token = blockIdx.x, b = q_len == 1 ? token : token / q_len;
  const int kv_len = a.kv_len[b];
  const unsigned token_vectors = a.kv_heads * a.row_vectors;
  const unsigned vector = blockIdx.y * blockDim.x + threadIdx.x;
  if (vector >= token_vectors) return;
  const long from = long(token) * token_vectors + vector;
  const uint4 k = a.k[from], v = a.v[from];
  const unsigned head = vector / a.row_vectors, column = vector % a.row_vectors;
  const int entry = cache.appended_entry(kv_len, int(q_len), int(token - b * q_len));
  if (entry < 0) return;
  const CacheView::MatrixRow at = cache.matrix_row(b, head, entry);
  const long to = (at.matrix * cache.matrix_rows() + at.row) * a.row_vectors + column;
  a.k_cache[to] = k;
  a.v_cache[to] = v;
}

/// The same for runs, and for a cache of any kind. The cache's tensors are `matrices` stacked ones: a page outside them
/// is not written.
__global__ void __launch_bounds__(kTokenThreads)
    kv_append_runs_kernel(const __grid_constant__ Vectors a, const __grid_constant__ RunTable table,
                          const __grid_constant__ AnyCacheView cache, long matrices) {
  const int token = table.first_row() + int(blockIdx.x);
  const RunTable::Run run = table.run[table.of_row(token)];
  wait_for_predecessors();
  let_successor_start();  // not earlier, so that attention finds the older keys: LaunchMode::after_waiting
  const int kv_len = a.kv_len[run.sequence];
  const unsigned token_vectors = a.kv_heads * a.row_vectors;
  const unsigned vector = blockIdx.y * blockDim.x + threadIdx.x;
  if (vector >= token_vectors) return;
  const long from = long(token) * token_vectors + vector;
  const uint4 k = a.k[from], v = a.v[from];
  const unsigned head = vector / a.row_vectors, column = vector % a.row_vectors;
  const int entry = cache.appended_entry(kv_len, run.count, token - run.first_row);
  if (entry < 0) return;
  const AnyCacheView::MatrixRow at = cache.matrix_row(run.sequence, head, entry);
  if (at.matrix < 0 || at.matrix >= matrices) return;
  const long to = (at.matrix * cache.matrix_rows() + at.row) * a.row_vectors + column;
  a.k_cache[to] = k;
  a.v_cache[to] = v;
}

}  // namespace

Status prepare(const ops::KvAppend::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_kv_append(const ops::KvAppend::Args& a, const TokenPlan& plan, LaunchList& launches) {
  const auto d = ops::KvAppend::dims(a);
  const std::int64_t vector_elements = vector_elements_of(a);
  return launch(ops::KvAppend::name, launches,
                {.grid = dim3(unsigned(d.batch * d.q_len), unsigned(plan.blocks)), .block = unsigned(plan.threads)},
                kv_append_kernel, vectors_of(a, vector_elements), unsigned(d.q_len),
                CacheView(a.k_cache).in_units_of(vector_elements));
}

Status launch_kv_append_runs(const ops::KvAppend::Args& a, const TableLaunches<TokenPlan>& all, LaunchList& launches) {
  const std::int64_t vector_elements = vector_elements_of(a);
  const AnyCacheView cache = AnyCacheView(a.k_cache, a.page_table, a.window).in_units_of(vector_elements);
  for (const RunTable& table : all.tables)
    CF_TRY(launch(
        ops::KvAppend::name, launches,
        {.grid = dim3(unsigned(table.rows()), unsigned(all.plan.blocks)), .block = unsigned(all.plan.threads)},
        kv_append_runs_kernel, vectors_of(a, vector_elements), table, cache, long(cache.matrices(a.k_cache.shape[0]))));
  return {};
}

}  // namespace cf::cuda
