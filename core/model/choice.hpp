#pragma once
// How a sequence's next id is chosen where it asks for more than the runner's own choice, and how likely that id was.
// All of it needs no more of a runner than its logits.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/model/runner.hpp"
#include "core/model/score.hpp"
#include "core/status.hpp"

namespace cf {

/// What is added to the logit of an id: below infinity; -infinity excludes the id.
struct LogitBias {
  std::int32_t id;
  float bias;
};

/// What a sequence's logits l, in float32, become before an id is chosen among them. The steps and their order are those
/// of Hugging Face's generate() (GenerationMixin._get_logits_processor), and of vLLM for the penalties that it lacks:
///   logit_bias          l + bias, for each id of the list
///   repetition_penalty  as Sampling says
///   frequency_penalty   l - frequency_penalty * (how often the output has the id); the prompt does not count
///   presence_penalty    l - presence_penalty, for every id that the output has
///   min_new_tokens      -infinity for the sequence's stop ids, until the output has so many ids
///   processor           whatever it makes of the logits, given the ids of the prompt and of the output; where it fails,
///                       the sequence fails with its Status
/// Temperature and cut-offs come after these. The choice is made on the host, by core/host_sampler.hpp; where nothing
/// changes the logits, the runner makes it.
struct LogitsChanges {
  using Processor = std::function<Status(std::span<float> logits, std::span<const std::int32_t> ids)>;

  std::vector<LogitBias> logit_bias{};
  double frequency_penalty = 0;
  double presence_penalty = 0;
  std::int64_t min_new_tokens = 0;
  Processor processor{};

  /// Whether there is nothing to change.
  bool none() const;
  /// Refuses ids outside the vocabulary, an id that has two biases, a bias that is NaN or infinity, penalties outside
  /// -2 to 2, and a negative min_new_tokens.
  Status validate(std::int64_t vocab_size) const;
};

/// How likely a chosen id was, by the formula of LogProbs over the logits that the model made: before penalties, biases,
/// temperature and cut-offs, as the `logprobs` of OpenAI's API and of vLLM are.
struct TokenLogprobs {
  double logprob = 0;
  std::vector<LikelyId> top{};  // the most likely ids
};

/// A choice that a sequence asks for.
struct ChoiceRequest {
  ModelRunner::Draw draw;
  std::size_t prompt_size = 0;  // of draw.history; the rest is the output
  const LogitsChanges* changes = nullptr;
  std::optional<std::int64_t> logprobs{};  // how many alternatives; no log-probabilities where it is empty
  /// The logits (vocab) on the host, in a runner's dtype, to choose among in place of the slot's own.
  std::optional<ConstAnyView<1>> logits{};
};
struct Choice {
  Result<std::int32_t> id;
  TokenLogprobs logprobs{};  // where they were asked for and an id was chosen
};

/// Chooses an id for each request: the runner, or the host where the logits change or lie there. Equal logits give both
/// the same id.
std::vector<Choice> choose_ids(ModelRunner& runner, std::span<const ChoiceRequest> requests);

}  // namespace cf
