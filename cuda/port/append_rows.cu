#include "cuda/port/run.hpp"

#include "cuda/device/sync.cuh"
#include "cuda/ops/any_cache.hpp"
#include "cuda/ops/token_plan.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// Block (i, j) takes token first + i. A thread copies 16 bytes of its keys and the same 16 bytes of its values. A
/// head's row is `row_vectors` times 16 bytes, the unit of `cache`; a token's is `token_vectors`. A new entry that the
/// cache has already is left alone, since attention may read it at the same time. The cache's tensors are `matrices`
/// stacked ones: a page outside them is not written.
__global__ void __launch_bounds__(kTokenThreads)
    append_rows_kernel(const uint4* k, const uint4* v, uint4* k_rows, uint4* v_rows, uint4* k_cache, uint4* v_cache,
                       unsigned first, unsigned last, unsigned token_vectors, unsigned row_vectors,
                       const __grid_constant__ AnyCacheView cache, long matrices, bool is_appended) {
  let_successor_start();
  wait_for_predecessors();
  const unsigned token = first + blockIdx.x, vector = blockIdx.y * blockDim.x + threadIdx.x;
  if (vector >= token_vectors) return;
  const bool is_new = token == last;
  const long at = long(token) * token_vectors + vector;
  const uint4 key = is_new ? k[vector] : k_rows[at], value = is_new ? v[vector] : v_rows[at];
  if (is_new) {
    k_rows[at] = key;
    v_rows[at] = value;
    if (is_appended) return;
  }
  const AnyCacheView::MatrixRow entry = cache.matrix_row(0, vector / row_vectors, token);
  if (entry.matrix < 0 || entry.matrix >= matrices) return;
  const long to = (entry.matrix * cache.matrix_rows() + entry.row) * row_vectors + vector % row_vectors;
  k_cache[to] = key;
  v_cache[to] = value;
}

}  // namespace

Status prepare(const AppendRows::Args& args, LaunchList& launches) {
  const ops::KvAppend::Args& a = args.append;
  const TokenRows& rows = args.rows;
  CF_TRY(check_call(args, launches));
  const auto d = AppendRows::dims(args);
  CF_TRY(check_multiple_of_8(AppendRows::name, "head_dim", d.head_dim));
  const std::int64_t vector_elements = 16 / std::int64_t(size_bytes(a.k.dtype)),
                     row_vectors = d.head_dim / vector_elements;
  const TokenPlan plan = token_plan(d.kv_heads * row_vectors);
  const AnyCacheView cache = AnyCacheView(a.k_cache, a.page_table, {}).in_units_of(vector_elements);
  return launch(
      AppendRows::name, launches,
      {.grid = dim3(unsigned(rows.last - rows.first + 1), unsigned(plan.blocks)), .block = unsigned(plan.threads)},
      append_rows_kernel, static_cast<const uint4*>(a.k.data), static_cast<const uint4*>(a.v.data),
      static_cast<uint4*>(rows.k.data), static_cast<uint4*>(rows.v.data), static_cast<uint4*>(a.k_cache.data),
      static_cast<uint4*>(a.v_cache.data), unsigned(rows.first), unsigned(rows.last),
      unsigned(d.kv_heads * row_vectors), unsigned(row_vectors), cache, long(cache.matrices(a.k_cache.shape[0])),
      args.is_appended);
}

}  // namespace cf::cuda
