#include "cuda/device/async.cuh"
#include "cuda/launch.hpp"

namespace cf::cuda {
namespace {

/// A block a token; 16 bytes a thread and step. A kv_len that the cache has no room for writes nothing.
__global__ void kv_append_kernel(const __grid_constant__ ops::KvAppend::Args a, int element_bytes) {
  let_successor_start();
  wait_for_predecessors();
  const long batch = a.kv_len.shape[0], q_len = a.k.shape[0] / batch, heads = a.k.shape[1],
             capacity = a.k_cache.shape[2];
  const long row_vectors = a.k.shape[2] * element_bytes / 16;
  const long token = blockIdx.x, b = token / q_len, kv_len = a.kv_len.data[b], entry = kv_len - q_len + token % q_len;
  if (kv_len < q_len || kv_len > capacity) return;
  const uint4 *k = static_cast<const uint4*>(a.k.data), *v = static_cast<const uint4*>(a.v.data);
  uint4 *k_cache = static_cast<uint4*>(a.k_cache.data), *v_cache = static_cast<uint4*>(a.v_cache.data);
  for (long i = threadIdx.x; i < heads * row_vectors; i += blockDim.x) {
    const long to = ((b * heads + i / row_vectors) * capacity + entry) * row_vectors + i % row_vectors;
    k_cache[to] = k[token * heads * row_vectors + i];
    v_cache[to] = v[token * heads * row_vectors + i];
  }
}

}  // namespace

Status run(const ops::KvAppend::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::KvAppend::dims(a);
  CF_TRY(check_multiple_of_8(ops::KvAppend::name, "head_dim", d.head_dim));
  return launch(ops::KvAppend::name, context, {.grid = unsigned(d.batch * d.q_len), .block = 256}, kv_append_kernel, a,
                int(size_bytes(a.k.dtype)));
}

}  // namespace cf::cuda
