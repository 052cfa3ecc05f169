#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/sampling.hpp"
#include "core/status.hpp"

/// The sampler on the host, over a row of logits (vocabulary), 1 to sampling::kMostTokens of them. `history` has the ids
/// of the sequence's prompt and output in any order, for the repetition penalty.
/// Logits of the oracle, in double, are rounded to float32 first, since the draw is defined on float32 scores. At
/// temperature 0 the doubles themselves are compared.
/// All functions refuse invalid settings, ids outside the vocabulary, a logit that is NaN or +infinity (the first one
/// is named), a score beyond float32, and logits that are all -infinity. Beside others, -infinity is never chosen.
namespace cf {

/// The next token's id, as core/sampling.hpp defines it: the same for the same logits, settings, history, `sequence`
/// (the caller's number of it) and `position` (0 or more), whatever other sequences there are.
Result<std::int32_t> sample(std::span<const float> logits, const Sampling& settings,
                            std::span<const std::int32_t> history, std::uint64_t sequence, std::int64_t position);
Result<std::int32_t> sample(std::span<const double> logits, const Sampling& settings,
                            std::span<const std::int32_t> history, std::uint64_t sequence, std::int64_t position);

struct TokenProbability {
  std::int32_t id;
  double probability;
};

/// The tokens that sample() draws from, in the order of their ids, each with its probability. A token whose weight is 0
/// is not kept, whatever the cut-offs say. At temperature 0 there is one token.
Result<std::vector<TokenProbability>> kept_tokens(std::span<const float> logits, const Sampling& settings,
                                                  std::span<const std::int32_t> history);
Result<std::vector<TokenProbability>> kept_tokens(std::span<const double> logits, const Sampling& settings,
                                                  std::span<const std::int32_t> history);

}  // namespace cf
