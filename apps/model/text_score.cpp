#include "apps/model/text_score.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/model/score.hpp"
#include "golden/checkpoint/token_file.hpp"

namespace cf::apps {

Result<std::vector<std::int32_t>> read_text(const std::string& path, std::optional<std::int64_t> limit) {
  CF_TRY_ASSIGN(checkpoint::TokenFile file, checkpoint::read_token_file(path, limit.value_or(checkpoint::kAllIds)));
  if (file.shape.size() > 1 && file.shape[0] != 1)
    return Status::error(Code::invalid_argument,
                         fmt::format("{}: expected ids in one row, got {} rows", path, file.shape[0]));
  if (limit && *limit < std::int64_t(file.ids.size())) file.ids.resize(std::size_t(*limit));
  return std::move(file.ids);
}

Status check_text(const std::string& source, std::span<const std::int32_t> ids, std::int64_t vocab_size) {
  if (ids.size() < 2)
    return Status::error(Code::invalid_argument,
                         fmt::format("{}: expected at least 2 ids, got {}", source, ids.size()));
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= vocab_size)
      return Status::error(Code::invalid_argument,
                           fmt::format("{}: id {}: expected 0 to {}, got {}", source, i, vocab_size - 1, ids[i]));
  return {};
}

std::vector<Window> windows_of(std::int64_t count, std::int64_t context, std::int64_t stride) {
  std::vector<Window> windows;
  for (std::int64_t first = 0, scored = 1; scored < count; first += stride) {
    const std::int64_t last = std::min(first + context, count);
    windows.push_back({first, last, scored});
    scored = last;
  }
  return windows;
}

Status score_windows(std::shared_ptr<SlotLease> slots, std::span<const std::int32_t> ids,
                     const std::vector<Window>& windows, const std::string& source,
                     const std::function<Status()>& check, const std::function<void(std::int64_t)>& tell,
                     const std::function<void(std::int64_t, double)>& score) {
  std::vector<ScorePrompt> prompts;
  std::vector<std::int64_t> begins;  // of the scored ids
  for (const Window& w : windows) {
    const auto part = ids.subspan(std::size_t(w.first), std::size_t(w.last - w.first));
    if (part.size() < 2) continue;  // the first id of a window has no prediction
    prompts.push_back({{part.begin(), part.end()}, std::max<std::int64_t>(1, w.scored - w.first)});
    begins.push_back(w.first + prompts.back().first);
  }
  CF_TRY_ASSIGN(Scorer scorer, Scorer::create(std::move(slots), prompts));
  Status ended;
  while (ended && !scorer.done()) {
    ended = check();
    if (ended) ended = scorer.step();
    tell(scorer.ids_read() * std::int64_t(ids.size()) / scorer.ids());
  }
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const PromptScore& made = scorer.scores()[i];
    if (!made.status)
      return Status::error(made.status.code(), fmt::format("{}: window {}: {}", source, i, made.status.message()));
    if (std::int64_t(made.ids.size()) < std::int64_t(prompts[i].ids.size()) - prompts[i].first) break;
    std::int64_t place = begins[i];
    for (const IdScore& id : made.ids) {
      if (!std::isfinite(id.log_prob))
        return Status::error(Code::invalid_argument,
                             fmt::format("{}: window {}: an id has the probability 0", source, i));
      score(place++, id.log_prob);
    }
  }
  return ended;
}

}  // namespace cf::apps
