#pragma once
// Where the kernels of rope_append write.
#include "core/cache_view.hpp"
#include "cuda/ops/rope/rope.cuh"

namespace cf::cuda {

struct AppendOutput {
  void *q, *k_cache, *v_cache;
  const std::int32_t* kv_len;
};

inline AppendOutput append_output(const ops::RopeAppend::Args& a) {
  return {.q = a.q.data, .k_cache = a.k_cache.data, .v_cache = a.v_cache.data, .kv_len = a.kv_len.data};
}

/// The rows of consecutive heads of an entry of a cache, from the first one's place in the stack of matrices on. Numbers
/// of matrices and of entries have 32 bits, which makes shorter products.
template <class T>
__device__ HeadRows<T> rows_in(T* cache, const CacheView::MatrixRow& at, long head_stride, int head_dim) {
  return {cache + int(at.matrix) * head_stride + long(int(at.row)) * head_dim, head_stride};
}

}  // namespace cf::cuda
