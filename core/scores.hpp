#pragma once
// Scores of a row of logits on the host. A token is chosen by its score; a Status says why none can be chosen.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/sampling.hpp"
#include "core/status.hpp"

namespace cf {

inline Status refuse_sample(std::string what) {
  return Status::error(Code::invalid_argument, "sample: " + std::move(what));
}

/// The scores of all tokens, in the precision Score, from a row of logits (vocab). `history` has the ids of the prompt
/// and the output in any order, for the repetition penalty.
/// Refuses invalid settings, ids outside the vocabulary, a logit that is NaN or +infinity (the first one is named), a
/// score beyond Score, and logits that are all -infinity.
template <class Score, class Real>
Result<std::vector<Score>> scores_of(std::span<const Real> logits, const Sampling& settings,
                                     std::span<const std::int32_t> history) {
  CF_TRY(settings.validate());
  const std::size_t n = logits.size();
  if (n < 1 || n > std::size_t(sampling::kMostTokens))
    return refuse_sample("the number of logits must be 1 to " + std::to_string(sampling::kMostTokens) + ", got " +
                         std::to_string(n));
  std::vector<bool> seen(n);
  for (std::size_t i = 0; i < history.size(); ++i) {
    if (history[i] < 0 || std::size_t(history[i]) >= n)
      return refuse_sample("history[" + std::to_string(i) + "] must be 0 to " + std::to_string(n - 1) + ", got " +
                           std::to_string(history[i]));
    seen[std::size_t(history[i])] = true;
  }

  constexpr Score infinity = std::numeric_limits<Score>::infinity();
  const auto penalty = Score(settings.repetition_penalty), temperature = Score(settings.rule().temperature);
  std::vector<Score> scores(n);
  for (std::size_t id = 0; id < n; ++id) {
    scores[id] = sampling::score(Score(logits[id]), seen[id], penalty, temperature);
    if (scores[id] < infinity) continue;
    const std::string name = "logits[" + std::to_string(id) + "]";
    if (std::isnan(logits[id])) return refuse_sample(name + " is NaN, expected a number below infinity");
    if (std::isinf(logits[id])) return refuse_sample(name + " is infinity, expected a number below it");
    return refuse_sample("the score of " + name + " must be a finite number, got infinity with " + to_string(settings));
  }
  if (*std::max_element(scores.begin(), scores.end()) == -infinity)
    return refuse_sample("every score is -infinity, expected a finite one");
  return scores;
}

}  // namespace cf
