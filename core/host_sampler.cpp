#include "core/host_sampler.hpp"

#include <algorithm>
#include <string>

#include "core/scores.hpp"

namespace cf {
namespace {

struct Token {
  std::uint64_t key, weight;
  std::int32_t id() const { return sampling::id_of(key); }
};

std::uint64_t sum_of_weights(const std::vector<Token>& tokens) {
  std::uint64_t sum = 0;
  for (const Token& t : tokens) sum += t.weight;
  return sum;
}

/// The tokens that the cut-offs keep, in the order of their ids.
std::vector<Token> keep(const std::vector<float>& scores, const SamplingRule& rule) {
  const float highest = *std::max_element(scores.begin(), scores.end());
  std::vector<Token> tokens;
  for (std::size_t id = 0; id < scores.size(); ++id)
    if (const std::uint64_t weight = sampling::weight(highest, scores[id]))
      tokens.push_back({sampling::order_key(scores[id], std::int32_t(id)), weight});

  const auto higher = [](const Token& a, const Token& b) { return a.key > b.key; };
  if (rule.top_k < std::int64_t(tokens.size())) {
    std::nth_element(tokens.begin(), tokens.begin() + rule.top_k, tokens.end(), higher);
    tokens.resize(std::size_t(rule.top_k));
  }
  if (rule.top_p_rest) {
    std::sort(tokens.begin(), tokens.end(), higher);
    const std::uint64_t asked = sampling::kept_sum(sum_of_weights(tokens), rule);
    std::uint64_t above = 0;
    std::size_t kept = 0;
    while (kept < tokens.size() && above < asked) above += tokens[kept++].weight;
    tokens.resize(kept);
  }
  std::erase_if(tokens, [&](const Token& t) { return t.weight < rule.least_weight; });
  std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) { return a.id() < b.id(); });
  return tokens;
}

template <class Real>
Result<std::vector<Token>> tokens_of(std::span<const Real> logits, const Sampling& settings,
                                     std::span<const std::int32_t> history) {
  if (!settings.greedy()) {
    CF_TRY_ASSIGN(const std::vector<float> scores, scores_of<float>(logits, settings, history));
    return keep(scores, settings.rule());
  }
  // The logits' own precision decides. max_element finds the first of equal scores.
  CF_TRY_ASSIGN(const std::vector<Real> scores, scores_of<Real>(logits, settings, history));
  const auto best = std::max_element(scores.begin(), scores.end());
  return std::vector<Token>{{sampling::order_key(float(*best), std::int32_t(best - scores.begin())), 1}};
}

template <class Real>
Result<std::int32_t> sample_from(std::span<const Real> logits, const Sampling& settings,
                                 std::span<const std::int32_t> history, std::uint64_t sequence, std::int64_t position) {
  if (position < 0) return refuse_sample("position must be 0 or more, got " + std::to_string(position));
  CF_TRY_ASSIGN(const std::vector<Token> tokens, tokens_of(logits, settings, history));
  const std::uint64_t random = sampling::random_bits(settings.seed, sequence, std::uint64_t(position));
  const std::uint64_t target = sampling::target(random, sum_of_weights(tokens));
  std::size_t i = 0;
  for (std::uint64_t sum = tokens[0].weight; sum <= target; sum += tokens[i].weight) ++i;
  return tokens[i].id();
}

template <class Real>
Result<std::vector<TokenProbability>> probabilities(std::span<const Real> logits, const Sampling& settings,
                                                    std::span<const std::int32_t> history) {
  CF_TRY_ASSIGN(const std::vector<Token> tokens, tokens_of(logits, settings, history));
  const auto sum = double(sum_of_weights(tokens));
  std::vector<TokenProbability> kept;
  for (const Token& t : tokens) kept.push_back({t.id(), double(t.weight) / sum});
  return kept;
}

}  // namespace

Result<std::int32_t> sample(std::span<const float> logits, const Sampling& settings,
                            std::span<const std::int32_t> history, std::uint64_t sequence, std::int64_t position) {
  return sample_from(logits, settings, history, sequence, position);
}
Result<std::int32_t> sample(std::span<const double> logits, const Sampling& settings,
                            std::span<const std::int32_t> history, std::uint64_t sequence, std::int64_t position) {
  return sample_from(logits, settings, history, sequence, position);
}

Result<std::vector<TokenProbability>> kept_tokens(std::span<const float> logits, const Sampling& settings,
                                                  std::span<const std::int32_t> history) {
  return probabilities(logits, settings, history);
}
Result<std::vector<TokenProbability>> kept_tokens(std::span<const double> logits, const Sampling& settings,
                                                  std::span<const std::int32_t> history) {
  return probabilities(logits, settings, history);
}

}  // namespace cf
