#include <algorithm>

#include "cuda/model/model_state.hpp"

namespace cf::cuda {
namespace {

/// Tokens of a launch, at most. Sequences end within it. Where a sequence is dropped or joined, the host asks the
/// launch to end, and the tokens made meanwhile are lost.
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
    return where[std::size_t(d.slot)] == place && d.left > 0 && d.position < lengths.most();
  });
}

Status Model::State::run_next(std::span<const Draw> draws, Start start) {
  const Where to = next_place();
  std::vector<Token> next = tokens_after(draws);
  CF_TRY(keep_logits(next, to));
  CF_TRY(run_step(to, start));
  can_follow = false;
  ahead = std::move(next);
  return {};
}

Model::State::End Model::State::end_of(const Draw& d) const {
  const auto stop_ids = d.stop.first(std::min(d.stop.size(), PersistentKernel::most_stop_ids()));
  return {.position = d.position + std::min(d.left, lengths.most() - d.position),
          .stop_ids = {stop_ids.begin(), stop_ids.end()}};
}

Status Model::State::run_ahead(std::span<const Draw> draws) {
  ahead.clear();
  if (kernel_chooses(draws)) return run_many_ahead(draws);
  if (can_follow && knows_next(draws)) return run_next(draws, Start::follows);
  end_launch();
  return {};
}

Status Model::State::run_many_ahead(std::span<const Draw> draws) {
  ahead.clear();
  // The sequences that go on behind the token that is being chosen.
  std::vector<Draw> running;
  std::copy_if(draws.begin(), draws.end(), std::back_inserter(running),
               [&](const Draw& d) { return end_of(d).position > d.position; });
  const auto in_flight = std::int64_t(end_token - next_token);
  // A launch keeps the ends that it was given when it was enqueued.
  const bool ends_are_told = !last_token || std::all_of(running.begin(), running.end(), [&](const Draw& d) {
    return told_ends[std::size_t(d.slot)] == end_of(d);
  });
  if (running.empty() || !knows_next(running) || !ends_are_told || (in_flight == 0 && !can_follow)) {
    end_launch();
    return {};
  }
  std::vector<Token> next = tokens_after(running);
  // The next launch has tokens until the last sequence reaches its end.
  std::vector<End> ends;  // hold the stop ids that `sequence_ends` refers to
  std::vector<PersistentEnd> sequence_ends(std::size_t(options.slots), {.tokens = 0, .stop_ids = {}});
  std::int64_t most = 0;
  for (const Draw& d : running) {
    const End& end = ends.emplace_back(end_of(d));
    const std::int64_t tokens = std::max<std::int64_t>(end.position - d.position - in_flight, 0);
    sequence_ends[std::size_t(d.slot)] = {.tokens = tokens, .stop_ids = end.stop_ids};
    most = std::max(most, tokens);
  }
  // The next launch is enqueued while the last one still has a token to make, so that the device does not wait.
  if (in_flight <= 1 && most > 0) {
    const std::int64_t count = std::min(most, kLaunchTokens);
    const Where to = next_place();
    CF_TRY(keep_logits(next, to));
    CF_TRY(begin_step(to, Start::follows, {}));
    CF_TRY_ASSIGN(const unsigned first, whole->enqueue_tokens(stream.get(), count, logits_at(to), sequence_ends));
    if (in_flight == 0) next_token = first;
    end_token = first + unsigned(count);
    last_step = to;
    can_follow = false;
    for (std::size_t i = 0; i < running.size(); ++i) told_ends[std::size_t(running[i].slot)] = std::move(ends[i]);
  }
  ahead = std::move(next);
  return {};
}

bool Model::State::has_stopped(const Draw& d) const {
  const std::vector<std::int32_t> stop_ids = end_of(d).stop_ids;
  return std::find(stop_ids.begin(), stop_ids.end(), last_chosen[std::size_t(d.slot)]) != stop_ids.end();
}

Status Model::State::take_choices(std::span<const Draw> draws) {
  CF_TRY(await_choices(draws, [&](const Draw& d) { return whole->made(*last_token, d.slot); }));
  std::vector<Draw> running;
  std::copy_if(draws.begin(), draws.end(), std::back_inserter(running), [&](const Draw& d) { return !has_stopped(d); });
  return run_many_ahead(running);
}

void Model::State::end_launch() {
  ahead.clear();
  if (next_token == end_token) return;
  whole->end_before(next_token);
  next_token = end_token;
  can_follow = false;
}

Status Model::State::restore_logits(std::int64_t slot) {
  if (has_logits(slot)) return {};
  end_launch();
  last_token.reset();
  std::vector<Token> again;
  for (std::int64_t other = 0; other < options.slots; ++other)
    if (!has_logits(other))
      again.push_back({.slot = other, .id = last_ids[std::size_t(other)], .position = lengths[other] - 1});
  const Where to = next_place();
  CF_TRY(keep_logits(again, to));
  CF_TRY(enqueue_tokens(again));
  CF_TRY(run_step(to, Start::placed));
  can_follow = true;
  for (const Token& t : again) {
    where[std::size_t(t.slot)] = to;
    made_by[std::size_t(t.slot)].reset();
  }
  return {};
}

Status Model::State::take_report() {
  CF_TRY(executor.take_report());
  return whole ? whole->take_report() : Status();
}

}  // namespace cf::cuda
