#include "cuda/ops/attention/kv_append.hpp"

#include "core/cache_view.hpp"
#include "cuda/device/sync.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A thread copies 16 bytes of a token's keys and the same 16 bytes of its values. A row is one head's key or value,
/// `row_vectors` times 16 bytes, the unit of `cache`. A kv_len that the cache has no room for writes nothing.
__global__ void __launch_bounds__(kTokenThreads)
    kv_append_kernel(const __grid_constant__ ops::KvAppend::Args a, unsigned q_len, unsigned row_vectors,
                     const __grid_constant__ CacheView cache) {
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
  const int entry = cache.appended_entry(kv_len, int(q_len), int(token - b * q_len));
  if (entry < 0) return;
  const long to = cache.entry(b, head, entry) + column;
  static_cast<uint4*>(a.k_cache.data)[to] = k;
  static_cast<uint4*>(a.v_cache.data)[to] = v;
}

}  // namespace

Status prepare(const ops::KvAppend::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_kv_append(const ops::KvAppend::Args& a, const TokenPlan& plan, LaunchList& launches) {
  const auto d = ops::KvAppend::dims(a);
  const std::int64_t vector_elements = 16 / std::int64_t(size_bytes(a.k.dtype)),
                     row_vectors = d.head_dim / vector_elements;
  return launch(ops::KvAppend::name, launches,
                {.grid = dim3(unsigned(d.batch * d.q_len), unsigned(plan.blocks)), .block = unsigned(plan.threads)},
                kv_append_kernel, a, unsigned(d.q_len), unsigned(row_vectors),
                CacheView(a.k_cache).in_units_of(vector_elements));
}

}  // namespace cf::cuda
