#pragma once
// What backends share whose slots are streams: sequences without a bound, of which a cache keeps the first tokens and
// the newest ones.
#include <cstdint>
#include <span>
#include <vector>

#include "core/cache_tensors.hpp"
#include "core/model/run.hpp"
#include "core/model/shape.hpp"
#include "core/model/slot_lengths.hpp"
#include "core/status.hpp"

namespace cf {

/// Refuses what check_window() refuses, and streams of a model for which they have no meaning: one without RoPE, and a
/// stream beyond the model's own window.
Status check_stream(const ModelSpec& model, const KeyWindow& stream);

/// Refuses runs that begin too far back: a slot with a cache of `capacity` entries can go back to a token while the
/// cache still has all that this token saw.
Status check_rewinds(const KeyWindow& stream, std::int64_t capacity, const SlotLengths& lengths,
                     std::span<const Run> runs);

/// The angles of a model's RoPE for a distance of one, (rotary_dim / 2): those that ops::rope_rows() multiplies with
/// positions.
std::vector<double> rope_frequencies(const ModelSpec& model);

/// The position within the cache of a query at a position in the text. It is the query's position for the sinks.
constexpr std::int64_t position_in_cache(const KeyWindow& stream, std::int64_t position) {
  const std::int64_t last = stream.sinks + stream.keys - 1;
  return position < last ? position : last;
}

}  // namespace cf
