#pragma once
// The log-probabilities of a text's ids, for the commands that score one.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/model/slot_lease.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// The ids of a .npy file that has one row of them, or the first `limit`.
Result<std::vector<std::int32_t>> read_text(const std::string& path, std::optional<std::int64_t> limit);

/// Refuses fewer than two ids, and ids outside a vocabulary. `source` names them.
Status check_text(const std::string& source, std::span<const std::int32_t> ids, std::int64_t vocab_size);

/// A part of a text that goes through the model by itself: ids [first, last). The predictions of id `scored` and of the
/// later ones are scored.
struct Window {
  std::int64_t first, last, scored;
};

/// Windows of `context` ids, `stride` apart; each scores what the one before has not. The first id has no prediction.
/// Source: transformers, docs/source/en/perplexity.md.
std::vector<Window> windows_of(std::int64_t count, std::int64_t context, std::int64_t stride);

/// Scores the windows' ids, and keeps no logits: calls score(i, log p(id i | the ids before it in its window)) in the
/// order of the ids. Where `check` ends it, the windows before that are told. `tell` is given how many of the ids are
/// done. Refuses an id of the probability 0.
Status score_windows(std::shared_ptr<SlotLease> slots, std::span<const std::int32_t> ids,
                     const std::vector<Window>& windows, const std::string& source,
                     const std::function<Status()>& check, const std::function<void(std::int64_t)>& tell,
                     const std::function<void(std::int64_t, double)>& score);

}  // namespace cf::apps
