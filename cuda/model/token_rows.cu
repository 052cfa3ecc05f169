#include "cuda/model/token_rows.hpp"

#include "cuda/device/sync.cuh"
#include "cuda/ops/token_plan.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A thread copies 16 bytes of a token's keys and the same 16 bytes of its values. A head's row is `row_vectors` times
/// 16 bytes.
__global__ void __launch_bounds__(kTokenThreads)
    turn_rows_kernel(const uint4* k_rows, const uint4* v_rows, uint4* k_cache, uint4* v_cache, unsigned token_vectors,
                     unsigned row_vectors, long capacity) {
  let_successor_start();
  wait_for_predecessors();
  const unsigned token = blockIdx.x, vector = blockIdx.y * blockDim.x + threadIdx.x;
  if (vector >= token_vectors) return;
  const long from = long(token) * token_vectors + vector;
  const long to = (long(vector / row_vectors) * capacity + token) * row_vectors + vector % row_vectors;
  const uint4 k = k_rows[from], v = v_rows[from];
  k_cache[to] = k;
  v_cache[to] = v;
}

__global__ void __launch_bounds__(kTokenThreads)
    store_row_kernel(const uint4* k, const uint4* v, uint4* k_row, uint4* v_row, unsigned token_vectors) {
  let_successor_start();
  wait_for_predecessors();
  const unsigned vector = blockIdx.x * blockDim.x + threadIdx.x;
  if (vector >= token_vectors) return;
  k_row[vector] = k[vector];
  v_row[vector] = v[vector];
}

/// The 16-byte vectors of `elements`.
std::int64_t vectors(const TokenRows& rows, std::int64_t elements) {
  return elements * std::int64_t(size_bytes(rows.k.dtype)) / 16;
}

}  // namespace

Status add_turned_rows(const TokenRows& rows, std::int64_t tokens, const AnyView<4>& k_cache, const AnyView<4>& v_cache,
                       LaunchList& launches) {
  if (tokens == 0) return {};
  const std::int64_t token_vectors = vectors(rows, rows.k.shape[1]);
  const TokenPlan plan = token_plan(token_vectors);
  return launch("turn_rows", launches,
                {.grid = dim3(unsigned(tokens), unsigned(plan.blocks)), .block = unsigned(plan.threads)},
                turn_rows_kernel, static_cast<const uint4*>(rows.k.data), static_cast<const uint4*>(rows.v.data),
                static_cast<uint4*>(k_cache.data), static_cast<uint4*>(v_cache.data), unsigned(token_vectors),
                unsigned(vectors(rows, k_cache.shape[3])), long(k_cache.shape[2]));
}

Status add_stored_row(const AnyView<3>& k, const AnyView<3>& v, const TokenRows& rows, std::int64_t token,
                      LaunchList& launches) {
  const std::int64_t token_vectors = vectors(rows, rows.k.shape[1]);
  const TokenPlan plan = token_plan(token_vectors);
  return launch("store_row", launches, {.grid = unsigned(plan.blocks), .block = unsigned(plan.threads)},
                store_row_kernel, static_cast<const uint4*>(k.data), static_cast<const uint4*>(v.data),
                static_cast<uint4*>(rows.k.data) + token * token_vectors,
                static_cast<uint4*>(rows.v.data) + token * token_vectors, unsigned(token_vectors));
}

}  // namespace cf::cuda
