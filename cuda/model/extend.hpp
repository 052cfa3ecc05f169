#pragma once
// What a step's lengths, positions and ids are made from, on the device. Private to cuda/model.
#include <cstdint>

#include "core/view.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// kv_len[b] += q_len;  positions[b * q_len + i] = kv_len[b] - q_len + i, with the new kv_len.
Status enqueue_extend(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t q_len,
                      const Context& context);

inline constexpr int kMaxSlots = 64;

/// The token of each slot in a step, as the host gives it: its id, its position, and the slot's entries with it. A slot
/// without a token is idle: its length is kIdleLength.
struct SlotTokens {
  std::int32_t id[kMaxSlots];
  std::int32_t position[kMaxSlots];
  std::int32_t length[kMaxSlots];
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

}  // namespace cf::cuda
