#include "cuda/model/extend.hpp"

#include "cuda/device/sync.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// Each block extends one sequence.
__global__ void extend_kernel(std::int32_t* positions, std::int32_t* kv_len, std::int32_t q_len) {
  let_successor_start();
  wait_for_predecessors();
  const std::int32_t before = kv_len[blockIdx.x];
  __syncthreads();  // every thread has read the length that the first one changes
  if (threadIdx.x == 0) kv_len[blockIdx.x] = before + q_len;
  for (std::int32_t i = std::int32_t(threadIdx.x); i < q_len; i += std::int32_t(blockDim.x))
    positions[long(blockIdx.x) * q_len + i] = before + i;
}

}  // namespace

Status enqueue_extend(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t q_len,
                      const Context& context) {
  LaunchList launches(context);
  CF_TRY(launch("extend", launches, {.grid = unsigned(kv_len.size()), .block = q_len == 1 ? 32u : 128u}, extend_kernel,
                positions.data, kv_len.data, q_len));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

}  // namespace cf::cuda
