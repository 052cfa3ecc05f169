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

/// The tokens of a step of all slots, one each, as the host gives them.
struct SlotTokens {
  std::int32_t id[kMaxSlots];
  std::int32_t
      position[kMaxSlots];  // that of a slot without a token is the cache's capacity: nothing is appended there
};
/// The device's arrays of a step, (slots) each.
struct StepArrays {
  View<std::int32_t, 1> ids, positions, kv_len;
};

/// ids = tokens.id, positions = tokens.position and kv_len = positions + 1.
Status enqueue_place(const StepArrays& step, const SlotTokens& tokens, const Context& context);
/// The step that follows: ids = chosen, and positions and kv_len grow by 1, except where a position is the capacity.
Status add_follow(const StepArrays& step, View<const std::int32_t, 1> chosen, std::int32_t capacity,
                  LaunchList& launches);

/// The end of a slot's prompt: positions and kv_len are those of its last token, as is `length`, from the prompt's own
/// kv_len.
Status enqueue_end_of_prompt(const StepArrays& step, View<std::int32_t, 1> lengths, View<const std::int32_t, 1> kv_len,
                             std::int64_t slot, const Context& context);

}  // namespace cf::cuda
