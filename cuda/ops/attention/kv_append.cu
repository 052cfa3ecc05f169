#include "cuda/device/math.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/ops/run.hpp"
#include "cuda/ops/token_plan.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A thread copies 16 bytes of a token's keys and the same 16 bytes of its values. A row is one head's key or value,
/// `row_vectors` times 16 bytes. A kv_len that the cache has no room for writes nothing.
__global__ void __launch_bounds__(kTokenThreads)
    kv_append_kernel(const __grid_constant__ ops::KvAppend::Args a, unsigned q_len, unsigned row_vectors) {
  let_successor_start();
  wait_for_predecessors();
  // The stores need kv_len, so its load comes first. A decode step computes its address without a division.
  const unsigned token = blockIdx.x, b = q_len == 1 ? token : token / q_len;
  const int kv_len = a.kv_len.data[b];
  const unsigned kv_heads = unsigned(a.k.shape[1]), token_vectors = kv_heads * row_vectors;
  const unsigned vector = blockIdx.y * blockDim.x + threadIdx.x;
  if (vector >= token_vectors) return;
  const long from = long(token) * token_vectors + vector;
  const uint4 k = static_cast<const uint4*>(a.k.data)[from], v = static_cast<const uint4*>(a.v.data)[from];
  const unsigned head = vector / row_vectors, column = vector % row_vectors;
  const long capacity = a.k_cache.shape[2];
  const int entry = new_entry(kv_len, int(q_len), int(token - b * q_len), capacity);
  if (entry < 0) return;
  const long row = (long(b) * kv_heads + head) * capacity + entry, to = row * row_vectors + column;
  static_cast<uint4*>(a.k_cache.data)[to] = k;
  static_cast<uint4*>(a.v_cache.data)[to] = v;
}

}  // namespace

Status prepare(const ops::KvAppend::Args& a, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  const auto d = ops::KvAppend::dims(a);
  CF_TRY(check_multiple_of_8(ops::KvAppend::name, "head_dim", d.head_dim));
  const std::int64_t row_vectors = d.head_dim * std::int64_t(size_bytes(a.k.dtype)) / 16;
  const TokenPlan plan = token_plan(d.kv_heads * row_vectors);
  return launch(ops::KvAppend::name, launches,
                {.grid = dim3(unsigned(d.batch * d.q_len), unsigned(plan.blocks)), .block = unsigned(plan.threads)},
                kv_append_kernel, a, unsigned(d.q_len), unsigned(row_vectors));
}

}  // namespace cf::cuda
