#include "cuda/advance.hpp"

#include "cuda/device/async.cuh"
#include "cuda/launch.hpp"

namespace cf::cuda {
namespace {

__global__ void advance_kernel(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t count) {
  let_successor_start();
  wait_for_predecessors();
  const long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < positions.shape[0]) positions.data[i] += count;
  if (i < kv_len.shape[0]) kv_len.data[i] += count;
}

}  // namespace

Status enqueue_advance(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t count,
                       const Context& context) {
  constexpr unsigned threads = 128;
  const auto blocks = unsigned((positions.size() + threads - 1) / threads);  // no sequence has less than one position
  return launch("advance", context, {.grid = blocks, .block = threads}, advance_kernel, positions, kv_len, count);
}

}  // namespace cf::cuda
