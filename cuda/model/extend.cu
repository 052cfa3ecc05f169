#include "cuda/model/extend.hpp"

#include "core/cache_view.hpp"
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

/// Thread i places slot i.
__global__ void place_kernel(const __grid_constant__ SlotTokens tokens, std::int32_t* ids, std::int32_t* positions,
                             std::int32_t* kv_len, int slots) {
  let_successor_start();
  wait_for_predecessors();
  const int i = int(threadIdx.x);
  if (i >= slots) return;
  ids[i] = tokens.id[i];
  positions[i] = tokens.position[i];
  kv_len[i] = tokens.length[i];
}

__global__ void follow_kernel(const std::int32_t* chosen, std::int32_t capacity, std::int32_t* ids,
                              std::int32_t* positions, std::int32_t* kv_len, int slots) {
  let_successor_start();
  wait_for_predecessors();
  const int i = int(threadIdx.x);
  if (i >= slots) return;
  const std::int32_t length = kv_len[i];
  const bool goes_on = length != kIdleLength && length < capacity;
  ids[i] = chosen[i];
  positions[i] = goes_on ? positions[i] + 1 : 0;
  kv_len[i] = goes_on ? length + 1 : kIdleLength;
}

__global__ void end_of_prompt_kernel(const std::int32_t* from, std::int32_t* length, std::int32_t* position,
                                     std::int32_t* kv_len) {
  let_successor_start();
  wait_for_predecessors();
  if (threadIdx.x != 0) return;
  *length = *kv_len = *from;
  *position = *from - 1;
}

}  // namespace

Status enqueue_end_of_prompt(const StepArrays& step, View<std::int32_t, 1> lengths, View<const std::int32_t, 1> kv_len,
                             std::int64_t slot, const Context& context) {
  LaunchList launches(context);
  CF_TRY(launch("end_of_prompt", launches, {.grid = 1, .block = 32}, end_of_prompt_kernel, kv_len.data,
                lengths.data + slot, step.positions.data + slot, step.kv_len.data + slot));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

Status enqueue_place(const StepArrays& step, const SlotTokens& tokens, const Context& context) {
  LaunchList launches(context);
  CF_TRY(launch("place", launches, {.grid = 1, .block = kMaxSlots}, place_kernel, tokens, step.ids.data,
                step.positions.data, step.kv_len.data, int(step.ids.size())));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

Status add_follow(const StepArrays& step, View<const std::int32_t, 1> chosen, std::int32_t capacity,
                  LaunchList& launches) {
  return launch("follow", launches, {.grid = 1, .block = kMaxSlots}, follow_kernel, chosen.data, capacity,
                step.ids.data, step.positions.data, step.kv_len.data, int(step.ids.size()));
}

Status enqueue_extend(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t q_len,
                      const Context& context) {
  LaunchList launches(context);
  CF_TRY(launch("extend", launches, {.grid = unsigned(kv_len.size()), .block = q_len == 1 ? 32u : 128u}, extend_kernel,
                positions.data, kv_len.data, q_len));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

}  // namespace cf::cuda
