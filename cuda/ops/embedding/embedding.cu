#include "cuda/ops/embedding/embedding.hpp"

#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// Block t makes y of token t. The host cannot check ids and positions in device memory: one outside its table reads
/// nothing and makes the row NaN.
template <class T, bool Positions>
__global__ void embedding_kernel(const __grid_constant__ ops::Embedding::Args a) {
  let_successor_start();
  wait_for_predecessors();
  const long hidden = a.table.shape[1], id = a.ids.data[blockIdx.x];
  bool known = id >= 0 && id < a.table.shape[0];
  long position = 0;
  if constexpr (Positions) {
    position = a.positions.data[blockIdx.x];
    known = known && position >= 0 && position < a.position_table.shape[0];
  }
  for (long i = threadIdx.x * kVec; i < hidden; i += blockDim.x * kVec) {
    float v[kVec];
    if (known) {
      load_vec(a.table.data, a.table.dtype, id * hidden + i, v);
      if constexpr (Positions) {
        float p[kVec];
        load_vec(a.position_table.data, a.position_table.dtype, position * hidden + i, p);
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[e] += p[e];
      }
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = NAN;
    }
    store_vec(static_cast<T*>(a.y.data) + long(blockIdx.x) * hidden + i, v);
  }
}

}  // namespace

Status prepare(const ops::Embedding::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_embedding(const ops::Embedding::Args& a, const EmbeddingPlan& plan, LaunchList& launches) {
  return with_activation(ops::Embedding::name, a.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::Embedding::name, launches, {.grid = unsigned(plan.blocks), .block = unsigned(plan.threads)},
                  a.position_table ? embedding_kernel<T, true> : embedding_kernel<T, false>, a);
  });
}

}  // namespace cf::cuda
