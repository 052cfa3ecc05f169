#include "core/cache_view.hpp"
#include "cuda/ops/rope/rope_append.cuh"

namespace cf::cuda {
namespace {

/// The rows of consecutive heads of an entry of a cache, from the first one's place in the stack of matrices on. Numbers
/// of matrices and of entries have 32 bits, which makes shorter products.
template <class T>
__device__ HeadRows<T> rows_in(T* cache, const CacheView::MatrixRow& at, long head_stride, int head_dim) {
  return {cache + int(at.matrix) * head_stride + long(int(at.row)) * head_dim, head_stride};
}

/// Queries go to q, keys and values to the token's entry of its sequence's cache, and nowhere where a cache has no room
/// for kv_len.
template <class T>
struct RowsOfCache {
  const RopeInput& in;
  const AppendOutput& out;
  const CacheView& cache;
  int q_len;
  long head_stride;  // of the cache
  int sequence = 0, kv_len = 0;

  /// The stores of keys and values wait for kv_len: its load comes first.
  __device__ void begin(long token) {
    sequence = q_len == 1 ? int(token) : int(token) / q_len;
    kv_len = out.kv_len[sequence];
  }
  __device__ void locate(long) {}
  __device__ HeadRows<T> of(long token, int part, int head) const {
    if (part == 0) return token_rows<T>(out.q, token, head, in.heads, in.head_dim);
    const int entry = cache.appended_entry(kv_len, q_len, int(token) - sequence * q_len);
    if (entry < 0) return {nullptr, 0};
    T* const first = static_cast<T*>(part == 1 ? out.k_cache : out.v_cache);
    return rows_in(first, cache.matrix_row(sequence, head, entry), head_stride, in.head_dim);
  }
};

template <class T, int Heads, ops::QkvLayout Layout>
__global__ void __launch_bounds__(kTokenThreads, rope_blocks_per_sm(Heads))
    rope_append_kernel(const __grid_constant__ RopeInput in, const __grid_constant__ AppendOutput out,
                       const __grid_constant__ RopePlan plan, const __grid_constant__ CacheView cache, int q_len,
                       long head_stride) {
  rope_unit<T, Heads, Layout>(in, plan, blockIdx.x, RowsOfCache<T>{in, out, cache, q_len, head_stride});
}

}  // namespace

Status prepare(const ops::RopeAppend::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_rope_append(const ops::RopeAppend::Args& a, const RopePlan& plan, LaunchList& launches) {
  return launch_rope_of(a, plan, a.qkv.shape[0], [&](auto zero, auto layout, const LaunchShape& shape) {
    using T = decltype(zero);
    constexpr ops::QkvLayout kLayout = decltype(layout)::value;
    const CacheView cache(a.k_cache);
    return launch(ops::RopeAppend::name, launches, shape,
                  plan.heads == 1 ? rope_append_kernel<T, 1, kLayout> : rope_append_kernel<T, 4, kLayout>,
                  rope_input(a), append_output(a), plan, cache, int(ops::RopeAppend::dims(a).q_len),
                  long(cache.head_stride()));
  });
}

}  // namespace cf::cuda
