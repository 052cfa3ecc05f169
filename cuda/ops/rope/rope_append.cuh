#pragma once
// Where the kernels of rope_append write.
#include "cuda/ops/rope/rope.cuh"

namespace cf::cuda {

struct AppendOutput {
  void *q, *k_cache, *v_cache;
  const std::int32_t* kv_len;
};

inline AppendOutput append_output(const ops::RopeAppend::Args& a) {
  return {.q = a.q.data, .k_cache = a.k_cache.data, .v_cache = a.v_cache.data, .kv_len = a.kv_len.data};
}

}  // namespace cf::cuda
