#include <algorithm>

#include "cuda/model/model_state.hpp"

namespace cf::cuda {
namespace {

/// Tokens of a launch. Where a sequence ends the host asks the launch to end, too; the tokens made meanwhile are lost.
constexpr std::int64_t kLaunchTokens = 32;

/// Whether a draw takes the highest logit itself.
bool is_plain_greedy(const ModelRunner::Draw& d) {
  const SamplingRule rule = d.sampling.rule();
  return rule.top_k == 1 && rule.temperature == 1 && d.sampling.repetition_penalty == 1;
}

/// The tokens of the step after these draws, whose ids are being chosen.
std::vector<ModelRunner::Token> tokens_after(std::span<const ModelRunner::Draw> draws) {
  std::vector<ModelRunner::Token> next;
  for (const ModelRunner::Draw& d : draws) next.push_back({.slot = d.slot, .id = kNoToken, .position = d.position});
  return next;
}

}  // namespace

bool Model::State::kernel_chooses(std::span<const Draw> draws) const {
  // A launch overwrites the logits of all slots: those of a slot that has no draw could be asked for later.
  std::int64_t live = 0;
  for (std::int64_t slot = 0; slot < options.slots; ++slot) live += lengths[slot] > 0;
  return whole && !logits_asked && live == std::int64_t(draws.size()) &&
         std::all_of(draws.begin(), draws.end(), is_plain_greedy);
}

bool Model::State::knows_next(std::span<const Draw> draws) const {
  // After a prompt the next step is known only where there is one slot.
  const Where place = options.slots == 1 ? where[0] : last_step;
  return std::all_of(draws.begin(), draws.end(), [&](const Draw& d) {
    return where[std::size_t(d.slot)] == place && d.left > 0 && d.position < options.capacity;
  });
}

Status Model::State::run_next(std::span<const Draw> draws, Start start) {
  const Where to = next_place();
  std::vector<Token> next = tokens_after(draws);
  CF_TRY(keep_logits(next, to));
  CF_TRY(run_step(to, start));
  ahead = std::move(next);
  return {};
}

Status Model::State::run_ahead(std::span<const Draw> draws) {
  ahead.clear();
  if (!knows_next(draws)) {
    end_launch();
    return {};
  }
  if (!kernel_chooses(draws)) return run_next(draws, Start::follows);
  // How many more steps the sequences' limits and the cache leave room for: each appends one entry.
  const auto in_flight = std::int64_t(end_token - next_token);
  std::int64_t left = kLaunchTokens;
  for (const Draw& d : draws) left = std::min({left, d.left - in_flight, options.capacity - d.position - in_flight});
  std::vector<Token> next = tokens_after(draws);
  // The next launch is enqueued while the last one still has a token to make, so that the device does not wait.
  if (in_flight <= 1 && left > 0) {
    const Where to = next_place();
    CF_TRY(keep_logits(next, to));
    CF_TRY(begin_step(to, Start::follows, {}));
    CF_TRY_ASSIGN(const unsigned first, whole->enqueue_tokens(stream.get(), left, logits_at(to)));
    if (in_flight == 0) next_token = first;
    end_token = first + unsigned(left);
    last_step = to;
  }
  ahead = std::move(next);
  return {};
}

Status Model::State::take_choices(std::span<const Draw> draws) {
  CF_TRY(await_choices(draws, [&](const Draw& d) { return whole->made(*last_token, d.slot); }));
  return run_ahead(draws);
}

void Model::State::end_launch() {
  ahead.clear();
  if (next_token == end_token) return;
  whole->end_before(next_token);
  next_token = end_token;
}

bool Model::State::has_logits(std::int64_t slot) const {
  return !last_token || std::none_of(last_tokens.begin(), last_tokens.end(),
                                     [&](const Token& t) { return t.slot == slot && lengths[slot] == t.position + 1; });
}

Status Model::State::restore_logits(std::int64_t slot) {
  if (has_logits(slot)) return {};
  end_launch();
  last_token.reset();
  std::vector<Token> again;
  for (const Token& t : last_tokens)
    if (lengths[t.slot] == t.position + 1) again.push_back(t);
  CF_TRY(enqueue_tokens(again));
  const Where to = next_place();
  CF_TRY(run_step(to, Start::placed));
  for (const Token& t : again) where[std::size_t(t.slot)] = to;
  return {};
}

Status Model::State::take_report() {
  CF_TRY(executor.take_report());
  return whole ? whole->take_report() : Status();
}

}  // namespace cf::cuda
