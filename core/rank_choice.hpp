#pragma once
// How ranks that each have a part of a row of logits choose the token of the highest one, by one word each: the order key
// of its best token. Host and device share this arithmetic, and all ranks choose what one would choose among the row.
#include <cstdint>

#include "core/host_device.hpp"
#include "core/sampling.hpp"

namespace cf::sampling {

/// The order key of a token among the ids of all parts, by that among the ids of a part that begins at `first`.
CF_HD constexpr std::uint64_t key_among_all(std::uint64_t key_in_part, std::int32_t first) {
  const bool has_id = key_in_part != 0 && key_in_part != kRefusedKey;
  return has_id ? key_in_part - std::uint32_t(first) : key_in_part;
}

/// The id of the highest key of all parts, or `none` where no token can be chosen.
CF_HD constexpr std::int32_t id_of_highest(std::uint64_t key, std::int32_t none) {
  return key != 0 && key != kRefusedKey ? id_of(key) : none;
}

}  // namespace cf::sampling
