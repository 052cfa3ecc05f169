#include "cuda/model/extend.hpp"

#include <algorithm>

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

/// SlotTokens of at most `Slots` slots, as a kernel's parameter.
template <int Slots>
struct Placed {
  std::int32_t id[Slots], position[Slots], length[Slots];
};
/// Most models have few slots, and a small parameter is launched faster.
constexpr int kFewSlots = 64;
static_assert(sizeof(Placed<kMaxSlots>) < 32764 - 64, "what the parameters of a kernel may take");

/// Thread i places slot i.
template <int Slots>
__global__ void place_kernel(const __grid_constant__ Placed<Slots> tokens, std::int32_t* ids, std::int32_t* positions,
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

/// Thread i ends the prompt of slot i.
__global__ void ends_of_prompts_kernel(const std::int32_t* from, std::int32_t* lengths, std::int32_t* positions,
                                       std::int32_t* kv_len, int slots) {
  let_successor_start();
  wait_for_predecessors();
  const int i = int(threadIdx.x);
  if (i >= slots || from[i] == kIdleLength) return;
  lengths[i] = kv_len[i] = from[i];
  positions[i] = from[i] - 1;
}

/// Each block copies a row of `count` words.
template <class Word>
__global__ void gather_kernel(const Word* from, const std::int32_t* rows, Word* to, int count) {
  let_successor_start();
  wait_for_predecessors();
  const Word* const row = from + long(rows[blockIdx.x]) * count;
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) to[long(blockIdx.x) * count + i] = row[i];
}

/// The threads of a kernel with one for each slot, in one block.
unsigned slot_threads(std::int64_t slots) { return slots <= kFewSlots ? kFewSlots : kMaxSlots; }

template <int Slots>
Status add_place(const StepArrays& step, const SlotTokens& tokens, LaunchList& launches) {
  Placed<Slots> placed{};
  std::ranges::copy(tokens.id, placed.id);
  std::ranges::copy(tokens.position, placed.position);
  std::ranges::copy(tokens.length, placed.length);
  return launch("place", launches, {.grid = 1, .block = unsigned(Slots)}, place_kernel<Slots>, placed, step.ids.data,
                step.positions.data, step.kv_len.data, int(step.ids.size()));
}

template <class Word>
Status add_gather(const ConstAnyView<2>& from, View<const std::int32_t, 1> rows, const AnyView<2>& to,
                  LaunchList& launches) {
  const std::int64_t row_bytes = from.shape[1] * std::int64_t(size_bytes(from.dtype));
  return launch("gather", launches, {.grid = unsigned(rows.size()), .block = 128}, gather_kernel<Word>,
                static_cast<const Word*>(from.data), rows.data, static_cast<Word*>(to.data),
                int(row_bytes / std::int64_t(sizeof(Word))));
}

}  // namespace

Status enqueue_end_of_prompt(const StepArrays& step, View<std::int32_t, 1> lengths, View<const std::int32_t, 1> kv_len,
                             std::int64_t slot, const Context& context) {
  LaunchList launches(context);
  CF_TRY(launch("end_of_prompt", launches, {.grid = 1, .block = 32}, end_of_prompt_kernel, kv_len.data,
                lengths.data + slot, step.positions.data + slot, step.kv_len.data + slot));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

Status enqueue_ends_of_prompts(const StepArrays& step, View<std::int32_t, 1> lengths,
                               View<const std::int32_t, 1> kv_len, const Context& context) {
  LaunchList launches(context);
  CF_TRY(launch("ends_of_prompts", launches, {.grid = 1, .block = slot_threads(kv_len.size())}, ends_of_prompts_kernel,
                kv_len.data, lengths.data, step.positions.data, step.kv_len.data, int(kv_len.size())));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

Status enqueue_place(const StepArrays& step, const SlotTokens& tokens, const Context& context) {
  LaunchList launches(context);
  CF_TRY(tokens.id.size() <= kFewSlots ? add_place<kFewSlots>(step, tokens, launches)
                                       : add_place<kMaxSlots>(step, tokens, launches));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

Status add_follow(const StepArrays& step, View<const std::int32_t, 1> chosen, std::int32_t capacity,
                  LaunchList& launches) {
  return launch("follow", launches, {.grid = 1, .block = slot_threads(step.ids.size())}, follow_kernel, chosen.data,
                capacity, step.ids.data, step.positions.data, step.kv_len.data, int(step.ids.size()));
}

Status enqueue_gather(ConstAnyView<2> from, View<const std::int32_t, 1> rows, AnyView<2> to, const Context& context) {
  LaunchList launches(context);
  const bool in_vectors = from.shape[1] * std::int64_t(size_bytes(from.dtype)) % std::int64_t(sizeof(uint4)) == 0;
  CF_TRY(in_vectors ? add_gather<uint4>(from, rows, to, launches)
                    : add_gather<std::uint16_t>(from, rows, to, launches));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

Status enqueue_extend(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t q_len,
                      const Context& context) {
  LaunchList launches(context);
  CF_TRY(launch("extend", launches, {.grid = unsigned(kv_len.size()), .block = q_len == 1 ? 32u : 128u}, extend_kernel,
                positions.data, kv_len.data, q_len));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

}  // namespace cf::cuda
