#include "core/model/streams.hpp"

#include <string>

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

}  // namespace

Status check_stream(const ModelSpec& m, const KeyWindow& stream) {
  CF_TRY(check_window("model", stream));
  if (!stream) return {};
  if (m.traits.positions == Positions::learned || m.shape.rotary_dim == 0)
    return refused("window, sinks: expected a model with RoPE, got one without");
  if (m.traits.window > 0 && stream.keys + stream.sinks > m.traits.window)
    return refused("window, sinks: expected at most the config's sliding_window " + std::to_string(m.traits.window) +
                   " in all, got " + std::to_string(stream.keys + stream.sinks));
  return {};
}

Status check_rewinds(const KeyWindow& stream, std::int64_t capacity, const SlotLengths& lengths,
                     std::span<const Run> runs) {
  if (!stream) return {};
  for (const Run& r : runs) {
    // The oldest key behind the sinks that the first token sees beside its own.
    const std::int64_t oldest = stream.first(r.first_position + 1);
    const std::int64_t kept = lengths[r.sequence] - (capacity - stream.sinks);
    if (oldest < r.first_position && oldest < kept)
      return refused("slot " + std::to_string(r.sequence) + ": expected a first position of 0 or of " +
                     std::to_string(kept + stream.keys - 1) + " to " + std::to_string(lengths[r.sequence]) +
                     ", whose window the stream still has, got " + std::to_string(r.first_position));
  }
  return {};
}

}  // namespace cf
