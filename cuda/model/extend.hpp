#pragma once
// What a step's lengths, positions and ids are made from, on the device, and the rows that leave it. Private to
// cuda/model and cuda/serve.
#include <cstdint>
#include <vector>

#include "core/cache_view.hpp"
#include "core/view.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// kv_len[b] += q_len;  positions[b * q_len + i] = kv_len[b] - q_len + i, with the new kv_len.
Status enqueue_extend(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t q_len,
                      const Context& context);

inline constexpr int kMaxSlots = 1024;

/// The token of each slot in a step, as the host gives it: its id, its position, and the slot's entries with it. A slot
/// without a token is idle: its length is kIdleLength.
struct SlotTokens {
  /// All idle. `slots` is at most kMaxSlots.
  explicit SlotTokens(std::int64_t slots)
      : id(std::size_t(slots)), position(std::size_t(slots)), length(std::size_t(slots), kIdleLength) {}
  std::vector<std::int32_t> id, position, length;  // by slot
};
/// The device's arrays of a step, (slots) each.
struct StepArrays {
  View<std::int32_t, 1> ids, positions, kv_len;
};

/// Prepares a step whose tokens the host gives: ids = tokens.id, positions = tokens.position, kv_len = tokens.length.
Status enqueue_place(const StepArrays& step, const SlotTokens& tokens, const Context& context);
/// Adds the launch that prepares the step after a choice: ids = chosen, positions += 1, kv_len += 1. An idle slot stays
/// idle, and one whose cache is full becomes idle.
Status add_follow(const StepArrays& step, View<const std::int32_t, 1> chosen, std::int32_t capacity,
                  LaunchList& launches);

/// Records the end of a slot's prompt. `kv_len` (1) is the number of the slot's entries: it becomes lengths[slot] and
/// step.kv_len[slot]. step.positions[slot] becomes the position of the last entry.
Status enqueue_end_of_prompt(const StepArrays& step, View<std::int32_t, 1> lengths, View<const std::int32_t, 1> kv_len,
                             std::int64_t slot, const Context& context);
/// The same for every slot that is not idle in `kv_len` (slots).
Status enqueue_ends_of_prompts(const StepArrays& step, View<std::int32_t, 1> lengths,
                               View<const std::int32_t, 1> kv_len, const Context& context);

/// to[i] = from[rows[i]], rows of a matrix each.
Status enqueue_gather(ConstAnyView<2> from, View<const std::int32_t, 1> rows, AnyView<2> to, const Context& context);

}  // namespace cf::cuda
