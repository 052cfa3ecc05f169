#include "cuda/serve/pipeline.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace cf::cuda {
namespace {

using Token = ModelRunner::Token;
using Draw = ModelRunner::Draw;

/// The id of a token that is not known yet, or of a choice that could not be made.
constexpr std::int32_t kNoId = -1;

/// Tokens of a launch, at most. Sequences end within it. Where a sequence is dropped or joined, the host asks the
/// launch to end, and the tokens made meanwhile are lost.
constexpr std::int64_t kLaunchTokens = 32;

/// Whether a draw takes the highest logit itself.
bool is_plain_greedy(const Draw& d) {
  const SamplingRule rule = d.sampling.rule();
  return rule.top_k == 1 && rule.temperature == 1 && d.sampling.repetition_penalty == 1;
}

/// The tokens of the step after these draws, whose ids are being chosen.
std::vector<Token> tokens_after(std::span<const Draw> draws) {
  std::vector<Token> next;
  for (const Draw& d : draws) next.push_back({.slot = d.slot, .id = kNoId, .position = d.position});
  return next;
}

bool has_slot(std::span<const Token> tokens, std::int64_t slot) {
  return std::any_of(tokens.begin(), tokens.end(), [&](const Token& t) { return t.slot == slot; });
}

/// Which of `slots` slots have one of these tokens.
std::vector<bool> slots_of(std::span<const Token> tokens, std::int64_t slots) {
  std::vector<bool> has(std::size_t(slots), false);
  for (const Token& t : tokens) has[std::size_t(t.slot)] = true;
  return has;
}

}  // namespace

std::string_view to_string(Phase p) {
  constexpr std::array<std::string_view, kPhases> names{"idle", "placed", "ahead", "launched"};
  return names[std::size_t(p)];
}

std::string_view to_string(PipelineEvent e) {
  constexpr std::array<std::string_view, kPipelineEvents> names{"give_up", "begin_prompt", "begin_pass", "end_prompt",
                                                                "place",   "take",         "choose",     "read"};
  return names[std::size_t(e)];
}

Pipeline::Pipeline(PipelineDevice& device, std::int64_t slots, std::int64_t capacity, const EntryLimit& limit)
    : device_(device), lengths_(slots, capacity, limit), leases_(slots), slots_(std::size_t(slots)) {}

Status Pipeline::check(PipelineEvent event, Phase next) const {
  const Phases& allowed = kTransitions[std::size_t(event)][std::size_t(phase())];
  if (allowed.has(next)) return {};
  const std::string what =
      "pipeline: '" + std::string(to_string(event)) + "' is refused while " + std::string(to_string(phase()));
  return Status::error(Code::invalid_argument,
                       allowed.empty() ? what : what + " if it leads to " + std::string(to_string(next)));
}

Status Pipeline::enter(PipelineEvent event, State next) {
  CF_TRY(check(event, Phase(next.index())));
  state_ = std::move(next);
  return {};
}

const std::vector<Token>* Pipeline::foreseen() const {
  if (const auto* const ahead = std::get_if<Ahead>(&state_)) return &ahead->next;
  if (const auto* const launched = std::get_if<Launched>(&state_)) return &launched->next;
  return nullptr;
}

std::vector<Token>* Pipeline::foreseen() { return const_cast<std::vector<Token>*>(std::as_const(*this).foreseen()); }

bool Pipeline::foresees(std::span<const Token> tokens) const {
  const std::vector<Token>* const next = foreseen();
  return next && !tokens.empty() &&
         std::is_permutation(tokens.begin(), tokens.end(), next->begin(), next->end(),
                             [](const Token& a, const Token& b) {
                               return a.slot == b.slot && a.id == b.id && a.position == b.position;
                             });
}

void Pipeline::give_up() {
  if (const auto* const launched = std::get_if<Launched>(&state_)) device_.end_before(launched->token);
  if (phase() != Phase::placed) state_ = Idle{};
}

Status Pipeline::keep_logits(std::span<const Token> tokens, LogitsBuffer overwritten) {
  const std::vector<bool> has_token = slots_of(tokens, lengths_.slots());
  for (std::int64_t slot = 0; slot < lengths_.slots(); ++slot) {
    if (leases_.of(slot) != overwritten || lengths_[slot] == 0 || has_token[std::size_t(slot)]) continue;
    CF_TRY(keep(slot));
  }
  return {};
}

Status Pipeline::keep(std::int64_t slot) {
  CF_TRY(device_.keep(slot, leases_.of(slot), lengths_[slot]));
  leases_.lease(slot, LogitsBuffer::prompts, leases_.lost_to(slot));
  return {};
}

Status Pipeline::place(std::span<const Token> tokens) {
  const LogitsBuffer to = leases_.next_step();
  CF_TRY(keep_logits(tokens, to));
  CF_TRY(device_.place(tokens));
  CF_TRY(device_.run(Start::placed, to));
  leases_.write(to);
  return enter(PipelineEvent::place, Placed{});
}

Status Pipeline::restore(std::int64_t slot) {
  if (has_logits(slot)) return {};
  give_up();
  last_token_.reset();
  std::vector<Token> again;
  for (std::int64_t other = 0; other < lengths_.slots(); ++other)
    if (!has_logits(other)) again.push_back({.slot = other, .id = last_id(other), .position = lengths_[other] - 1});
  CF_TRY(place(again));
  for (const Token& t : again) leases_.lease(t.slot, leases_.last_step());
  return {};
}

Status Pipeline::read_logits(std::span<const std::int64_t> slots) {
  for (std::int64_t slot : slots) CF_TRY(lengths_.check(slot, 0, 1));
  logits_read_ = true;
  for (std::int64_t slot : slots) CF_TRY(restore(slot));
  return {};
}

void Pipeline::release(std::int64_t slot) {
  lengths_.set(slot, 0);
  // The step that is ahead has a token of this slot, so that the next step cannot be that one.
  if (const std::vector<Token>* const next = foreseen(); next && has_slot(*next, slot)) give_up();
}

void Pipeline::adopt(std::int64_t slot, std::int64_t n) {
  lengths_.set(slot, n);
  leases_.lease(slot, LogitsBuffer::prompts);
}

void Pipeline::cut(std::int64_t slot, std::int64_t n) {
  if (lengths_[slot] > n) lengths_.set(slot, n);
}

Status Pipeline::begin_prompt(std::int64_t slot, std::int64_t first, std::int64_t tokens) {
  CF_TRY(lengths_.check(slot, first, tokens));
  give_up();
  CF_TRY(enter(PipelineEvent::begin_prompt, Idle{}));
  logits_read_ = false;
  last_token_.reset();
  leases_.forget(slot);
  return {};
}

Status Pipeline::begin_pass(std::span<const Run> runs) {
  CF_TRY(lengths_.check(runs));
  give_up();
  CF_TRY(enter(PipelineEvent::begin_pass, Idle{}));
  logits_read_ = false;
  last_token_.reset();
  for (const Run& r : runs) leases_.forget(r.sequence);
  return {};
}

Status Pipeline::extend(std::int64_t slot, std::int64_t length, std::int32_t last_id) {
  CF_TRY(check(PipelineEvent::end_prompt, Phase::idle));
  lengths_.set(slot, length);
  slots_[std::size_t(slot)].last_id = last_id;
  return {};
}

Status Pipeline::end_prompt(std::int64_t slot) {
  // With other slots the device lacks the tokens of their last steps.
  const bool placed = lengths_.slots() == 1;
  CF_TRY(enter(PipelineEvent::end_prompt, placed ? State(Placed{}) : State(Idle{})));
  leases_.lease(slot, LogitsBuffer::prompts);
  return {};
}

Status Pipeline::step(std::span<const Token> tokens) {
  if (tokens.empty()) return {};
  std::vector<Run> runs;
  for (const Token& t : tokens) runs.push_back({.sequence = t.slot, .first_position = t.position});
  CF_TRY(lengths_.check(runs));
  if (foresees(tokens)) {
    last_token_.reset();
    State next = Placed{};
    if (const auto* const launched = std::get_if<Launched>(&state_)) {
      last_token_ = launched->token;
      if (launched->token + 1 != launched->end) next = Launched{launched->token + 1, launched->end, {}};
    }
    CF_TRY(enter(PipelineEvent::take, std::move(next)));
  } else {
    give_up();
    const std::vector<bool> has_token = slots_of(tokens, lengths_.slots());
    for (std::int64_t slot = 0; slot < lengths_.slots(); ++slot)
      if (!has_token[std::size_t(slot)]) CF_TRY(restore(slot));
    last_token_.reset();
    CF_TRY(place(tokens));
  }
  for (const Token& t : tokens) {
    lengths_.set(t.slot, t.position + 1);
    slots_[std::size_t(t.slot)].last_id = t.id;
    leases_.lease(t.slot, leases_.last_step(), last_token_);
  }
  return {};
}

bool Pipeline::launch_chooses(std::span<const Draw> draws) const {
  // A launch overwrites the logits of all slots: those of a slot that has no draw could be asked for later.
  std::int64_t live = 0;
  for (std::int64_t slot = 0; slot < lengths_.slots(); ++slot) live += lengths_[slot] > 0;
  return limits_.launches && !logits_read_ && live == std::int64_t(draws.size()) &&
         std::all_of(draws.begin(), draws.end(), is_plain_greedy);
}

bool Pipeline::knows_next(std::span<const Draw> draws) const {
  // After a prompt the next step is known only where there is one slot.
  const LogitsBuffer buffer = lengths_.slots() == 1 ? leases_.of(0) : leases_.last_step();
  return std::all_of(draws.begin(), draws.end(), [&](const Draw& d) {
    return leases_.of(d.slot) == buffer && d.left > 0 && d.position < lengths_.most();
  });
}

Pipeline::End Pipeline::end_of(const Draw& d) const {
  const auto stop_ids = d.stop.first(std::min(d.stop.size(), limits_.most_stop_ids));
  return {.position = d.position + std::min(d.left, lengths_.most() - d.position),
          .stop_ids = {stop_ids.begin(), stop_ids.end()}};
}

bool Pipeline::has_stopped(const Draw& d) const {
  const std::vector<std::int32_t> stop_ids = end_of(d).stop_ids;
  return std::find(stop_ids.begin(), stop_ids.end(), chosen(d.slot)) != stop_ids.end();
}

Status Pipeline::run_next(std::span<const Draw> draws, Start start) {
  const LogitsBuffer to = leases_.next_step();
  std::vector<Token> next = tokens_after(draws);
  CF_TRY(keep_logits(next, to));
  CF_TRY(device_.run(start, to));
  leases_.write(to);
  return enter(PipelineEvent::choose, Ahead{std::move(next)});
}

Result<std::int64_t> Pipeline::room_for_launch(std::span<const Draw> draws, std::span<const SlotEnd> ends,
                                               std::int64_t in_flight, std::int64_t count) {
  for (; count > 0; count /= 2) {
    std::vector<Run> runs;
    for (const Draw& d : draws)
      if (const std::int64_t tokens = std::min(ends[std::size_t(d.slot)].tokens, count); tokens > 0)
        runs.push_back({.sequence = d.slot, .first_position = d.position + in_flight, .count = tokens});
    CF_TRY_ASSIGN(const bool has_room, device_.make_room_for_launch(runs));
    if (has_room) break;
  }
  return count;
}

Status Pipeline::launch_next(PipelineEvent event, std::span<const Draw> draws) {
  auto* const launched = std::get_if<Launched>(&state_);
  if (launched) launched->next.clear();
  // The sequences that go on behind the token that is being chosen.
  std::vector<Draw> running;
  std::copy_if(draws.begin(), draws.end(), std::back_inserter(running),
               [&](const Draw& d) { return end_of(d).position > d.position; });
  const std::int64_t in_flight = launched ? launched->end - launched->token : 0;
  // A launch keeps the ends that it was given when it was enqueued.
  const bool ends_are_told = !last_token_ || std::all_of(running.begin(), running.end(), [&](const Draw& d) {
    return slot_of(d).told_end == end_of(d);
  });
  const bool follows = launched || phase() == Phase::placed;
  if (running.empty() || !knows_next(running) || !ends_are_told || !follows) {
    give_up();
    return stay(event);
  }
  std::vector<Token> next = tokens_after(running);
  // The next launch has tokens until the last sequence reaches its end.
  std::vector<End> ends;  // hold the stop ids that `slot_ends` refers to
  ends.reserve(running.size());
  std::vector<SlotEnd> slot_ends(slots_.size());
  std::int64_t most = 0;
  for (const Draw& d : running) {
    const End& end = ends.emplace_back(end_of(d));
    const std::int64_t tokens = std::max<std::int64_t>(end.position - d.position - in_flight, 0);
    slot_ends[std::size_t(d.slot)] = {.tokens = tokens, .stop_ids = end.stop_ids};
    most = std::max(most, tokens);
  }
  Launched to_come = launched ? Launched{launched->token, launched->end, {}} : Launched{0, 0, {}};
  // The next launch is enqueued while the last one still has a token to make, so that the device does not wait.
  if (in_flight <= 1 && most > 0) {
    CF_TRY_ASSIGN(const std::int64_t count,
                  room_for_launch(running, slot_ends, in_flight, std::min(most, kLaunchTokens)));
    if (count == 0 && !launched) return stay(event);
    if (count > 0) {
      const LogitsBuffer to = leases_.next_step();
      CF_TRY(keep_logits(next, to));
      CF_TRY_ASSIGN(const unsigned first, device_.launch(count, to, slot_ends));
      if (!launched) to_come.token = first;
      to_come.end = first + unsigned(count);
      leases_.write(to);
      for (std::size_t i = 0; i < running.size(); ++i) slot_of(running[i]).told_end = std::move(ends[i]);
    }
  }
  to_come.next = std::move(next);
  return enter(event, std::move(to_come));
}

Status Pipeline::choose_now(std::span<const Draw> draws) {
  give_up();
  for (const Draw& d : draws) CF_TRY(restore(d.slot));
  // The device draws for the position behind that of its last step, or behind a prompt. It may have gone on since, or
  // have left the slot out.
  for (const Draw& d : draws) {
    const LogitsBuffer buffer = leases_.of(d.slot);
    const bool is_last_step = phase() == Phase::placed && buffer == leases_.last_step();
    if (buffer != LogitsBuffer::prompts && !is_last_step) CF_TRY(keep(d.slot));
  }
  std::array<std::vector<Draw>, kLogitsBuffers> by_buffer;
  for (const Draw& d : draws) by_buffer[std::size_t(leases_.of(d.slot))].push_back(d);
  for (std::size_t b = 0; b < by_buffer.size(); ++b)
    if (!by_buffer[b].empty()) CF_TRY(device_.prepare_choice(LogitsBuffer(b), by_buffer[b]));
  const bool launches = launch_chooses(draws);
  bool steps = !launches && phase() == Phase::placed && knows_next(draws);
  if (steps) {
    CF_TRY_ASSIGN(steps, device_.make_room(tokens_after(draws)));
  }
  if (steps && by_buffer[std::size_t(leases_.last_step())].size() == draws.size()) {
    // The next step needs nothing from the host: it runs while the host reads the ids.
    CF_TRY(run_next(draws, Start::chooses));
  } else {
    for (std::size_t b = 0; b < by_buffer.size(); ++b)
      if (!by_buffer[b].empty()) CF_TRY(device_.choose(LogitsBuffer(b)));
    CF_TRY(launches ? launch_next(PipelineEvent::choose, draws)
           : steps  ? run_next(draws, Start::follows)
                    : stay(PipelineEvent::choose));
  }
  std::vector<std::int32_t> ids(draws.size(), kNoId);
  CF_TRY(device_.await(draws, ids));
  for (std::size_t i = 0; i < draws.size(); ++i) slot_of(draws[i]).chosen = ids[i];
  return {};
}

Status Pipeline::read_launched(std::span<const Draw> draws) {
  std::vector<std::int32_t> ids(draws.size(), kNoId);
  CF_TRY(device_.await_launched(*last_token_, draws, ids));
  for (std::size_t i = 0; i < draws.size(); ++i) slot_of(draws[i]).chosen = ids[i];
  std::vector<Draw> running;
  std::copy_if(draws.begin(), draws.end(), std::back_inserter(running), [&](const Draw& d) { return !has_stopped(d); });
  return launch_next(PipelineEvent::read, running);
}

Status Pipeline::choose(std::span<const Draw> draws) {
  if (draws.empty()) return {};
  for (const Draw& d : draws) {
    CF_TRY(lengths_.check(d.slot, 0, 1));
    CF_TRY(d.sampling.validate());
    if (d.position != lengths_[d.slot])
      return Status::error(Code::invalid_argument,
                           "model: slot " + std::to_string(d.slot) + ": expected a choice for position " +
                               std::to_string(lengths_[d.slot]) + ", got " + std::to_string(d.position));
  }
  const bool were_launched = last_token_ && std::all_of(draws.begin(), draws.end(), [&](const Draw& d) {
                               return leases_.lost_to(d.slot) == last_token_;
                             });
  CF_TRY(were_launched && launch_chooses(draws) ? read_launched(draws) : choose_now(draws));
  std::vector<Token>* const next = foreseen();
  if (!next) return {};
  for (Token& t : *next) t.id = chosen(t.slot);
  if (phase() == Phase::launched) {  // which has ended these sequences by itself
    for (const Draw& d : draws)
      if (has_stopped(d)) std::erase_if(*next, [&](const Token& t) { return t.slot == d.slot; });
    if (next->empty()) give_up();
  }
  return {};
}

}  // namespace cf::cuda
