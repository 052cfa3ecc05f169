#include "core/model/decoder.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "core/model/slot_lengths.hpp"

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "decoder: " + std::move(what)); }

std::string name_of(Decoder::Sequence sequence) { return "sequence " + std::to_string(sequence); }

/// A sequence from add() to drop().
struct Entry {
  SequenceOptions options{};
  std::vector<std::int32_t> tokens{};  // prompt and emitted ids
  std::size_t prompt_size = 0;
  std::vector<TokenLogprobs> logprobs{};  // of the emitted ids, where the options ask for them
  std::int64_t slot = -1;                 // the lease's; -1 while the sequence waits, and once it has ended
  bool prefilled = false;
  Finish finish = Finish::running;
  Status status{};

  std::int64_t emitted() const { return std::int64_t(tokens.size() - prompt_size); }
};

}  // namespace

std::string_view to_string(Finish f) {
  switch (f) {
    case Finish::running: return "running";
    case Finish::stop: return "stop";
    case Finish::length: return "length";
    case Finish::failed: return "failed";
  }
  return "unknown";
}

struct Decoder::State {
  std::shared_ptr<SlotLease> lease;
  ModelSpec model;
  DType activation;
  EntryLimit limit;
  std::map<Sequence, Entry> entries{};
  std::deque<Sequence> waiting{};
  std::vector<bool> taken;  // by slot
  Sequence next = 0;

  State(std::shared_ptr<SlotLease> l, const ModelRunner& runner)
      : lease(std::move(l)),
        model(runner.model()),
        activation(runner.activation()),
        limit(entry_limit(model, runner.capacity())),
        taken(std::size_t(lease->slots())) {}

  Result<const Entry*> find(Sequence sequence) const {
    const auto found = entries.find(sequence);
    if (found == entries.end()) return refused(name_of(sequence) + " is unknown or was dropped");
    return &found->second;
  }

  void end(Entry& e, Finish finish, Status status = {}) {
    if (e.slot >= 0) {
      if (const Result<ModelRunner*> runner = lease->runner()) (*runner)->release((*lease)[e.slot]);
      taken[std::size_t(e.slot)] = false;
    }
    e.slot = -1;
    e.finish = finish;
    e.status = std::move(status);
  }

  /// Gives free slots to the sequences that wait longest.
  void admit() {
    for (auto slot = taken.begin(); !waiting.empty(); waiting.pop_front()) {
      slot = std::find(slot, taken.end(), false);
      if (slot == taken.end()) return;
      *slot = true;
      entries.at(waiting.front()).slot = slot - taken.begin();
    }
  }

  /// Chooses an id for each of the sequences, whose slots have logits, and ends those whose last id it is.
  void choose(ModelRunner& runner, std::span<const Sequence> chosen, std::vector<Emitted>& emitted) {
    std::vector<ChoiceRequest> requests;
    for (Sequence s : chosen) {
      const Entry& e = entries.at(s);
      requests.push_back({.draw = {.slot = (*lease)[e.slot],
                                   .sampling = e.options.sampling,
                                   .sequence = e.options.id,
                                   .position = std::int64_t(e.tokens.size()),
                                   .history = e.tokens,
                                   .left = e.options.max_new_tokens - e.emitted() - 1,
                                   .stop = e.options.stop},
                          .prompt_size = e.prompt_size,
                          .changes = &e.options.changes,
                          .logprobs = e.options.logprobs});
    }
    std::vector<Choice> choices = choose_ids(runner, requests);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      Entry& e = entries.at(chosen[i]);
      const Result<std::int32_t>& id = choices[i].id;
      if (!id) {
        end(e, Finish::failed,
            Status::error(id.status().code(), "decoder: " + name_of(chosen[i]) + ": " + id.status().message()));
        continue;
      }
      e.tokens.push_back(*id);
      if (e.options.logprobs) e.logprobs.push_back(std::move(choices[i].logprobs));
      emitted.push_back({chosen[i], *id});
      if (std::find(e.options.stop.begin(), e.options.stop.end(), *id) != e.options.stop.end())
        end(e, Finish::stop);
      else if (e.emitted() >= e.options.max_new_tokens)
        end(e, Finish::length);
    }
  }

  Status prefill(std::vector<Emitted>& emitted) {
    admit();
    CF_TRY_ASSIGN(ModelRunner* const runner, lease->runner());
    for (auto& [sequence, e] : entries) {
      if (e.slot < 0 || e.prefilled) continue;
      CF_TRY(runner->prefill((*lease)[e.slot], 0, e.tokens));
      e.prefilled = true;
      choose(*runner, std::span(&sequence, 1), emitted);
    }
    return {};
  }

  Status step(std::span<const Sequence> running, std::vector<Emitted>& emitted) {
    std::vector<ModelRunner::Token> tokens;
    std::vector<Sequence> stepped;
    for (Sequence s : running) {
      Entry& e = entries.at(s);
      if (std::int64_t(e.tokens.size()) > limit.most) {
        end(e, Finish::failed,
            refused(name_of(s) + ": " + std::string(limit.name) + " of " + std::to_string(limit.most) +
                    " entries is reached after " + std::to_string(e.emitted()) + " new tokens"));
        continue;
      }
      tokens.push_back(
          {.slot = (*lease)[e.slot], .id = e.tokens.back(), .position = std::int64_t(e.tokens.size()) - 1});
      stepped.push_back(s);
    }
    if (tokens.empty()) return {};
    CF_TRY_ASSIGN(ModelRunner* const runner, lease->runner());
    CF_TRY(runner->step(tokens));
    choose(*runner, stepped, emitted);
    return {};
  }
};

Decoder::Decoder(std::unique_ptr<ModelRunner> runner) : Decoder(SlotLease::of_all(std::move(runner))) {}
Decoder::Decoder(std::shared_ptr<SlotLease> slots) {
  const ModelRunner& runner = **slots->runner();
  state_ = std::make_unique<State>(std::move(slots), runner);
}
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;
Decoder::~Decoder() = default;

Result<Decoder::Sequence> Decoder::add(std::span<const std::int32_t> prompt, SequenceOptions options) {
  State& s = *state_;
  const std::int64_t vocab_size = s.model.shape.vocab_size;
  if (prompt.empty()) return refused("prompt: expected at least one id, got none");
  if (std::int64_t(prompt.size()) > s.limit.most)
    return refused("prompt: expected at most " + std::to_string(s.limit.most) + " ids, " + std::string(s.limit.name) +
                   ", got " + std::to_string(prompt.size()));
  CF_TRY(check_ids("decoder", "prompt", prompt, vocab_size));
  CF_TRY(check_ids("decoder", "stop", options.stop, vocab_size));
  CF_TRY(options.sampling.validate());
  if (options.max_new_tokens < 1)
    return refused("max_new_tokens: expected at least 1, got " + std::to_string(options.max_new_tokens));
  CF_TRY(options.changes.validate(vocab_size));
  if (options.changes.min_new_tokens > options.max_new_tokens)
    return refused("min_new_tokens: expected at most max_new_tokens, " + std::to_string(options.max_new_tokens) +
                   ", got " + std::to_string(options.changes.min_new_tokens));
  if (options.logprobs && (*options.logprobs < 0 || *options.logprobs > vocab_size))
    return refused("logprobs: expected 0 to " + std::to_string(vocab_size) + " alternatives, got " +
                   std::to_string(*options.logprobs));
  s.entries.emplace(
      s.next,
      Entry{.options = std::move(options), .tokens = {prompt.begin(), prompt.end()}, .prompt_size = prompt.size()});
  s.waiting.push_back(s.next);
  s.admit();
  return s.next++;
}

Result<std::vector<Decoder::Emitted>> Decoder::prefill() {
  std::vector<Emitted> emitted;
  CF_TRY(state_->prefill(emitted));
  return emitted;
}

Result<std::vector<Decoder::Emitted>> Decoder::decode(std::int64_t steps) {
  if (steps < 1) return refused("steps: expected at least 1, got " + std::to_string(steps));
  std::vector<Emitted> emitted;
  for (std::int64_t i = 0; i < steps && active(); ++i) {
    // The sequences that ran before the prefill: a turn gives each sequence one id, from its prefill or from the step.
    std::vector<Sequence> running;
    for (const auto& [sequence, e] : state_->entries)
      if (e.slot >= 0 && e.prefilled) running.push_back(sequence);
    CF_TRY(state_->prefill(emitted));
    CF_TRY(state_->step(running, emitted));
  }
  return emitted;
}

Status Decoder::drop(Sequence sequence) {
  CF_TRY(state_->find(sequence).status());
  const auto found = state_->entries.find(sequence);
  std::erase(state_->waiting, sequence);
  state_->end(found->second, Finish::running);
  state_->entries.erase(found);
  return {};
}

bool Decoder::active() const {
  return !state_->waiting.empty() || std::any_of(state_->taken.begin(), state_->taken.end(), [](bool t) { return t; });
}

std::int64_t Decoder::free_slots() const { return std::count(state_->taken.begin(), state_->taken.end(), false); }

std::vector<Decoder::Sequence> Decoder::ended() const {
  std::vector<Sequence> ended;
  for (const auto& [sequence, e] : state_->entries)
    if (e.finish != Finish::running) ended.push_back(sequence);
  return ended;
}

Result<bool> Decoder::waits(Sequence sequence) const {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  return e->slot < 0 && e->finish == Finish::running;
}

Result<std::vector<std::int32_t>> Decoder::ids(Sequence sequence) const {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  return std::vector<std::int32_t>(e->tokens.begin() + std::ptrdiff_t(e->prompt_size), e->tokens.end());
}

Result<std::vector<TokenLogprobs>> Decoder::logprobs(Sequence sequence, std::int64_t first) const {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  if (first < 0 || first > e->emitted())
    return refused("first: expected 0 to " + std::to_string(e->emitted()) + ", the new ids, got " +
                   std::to_string(first));
  if (e->logprobs.empty()) return std::vector<TokenLogprobs>();
  return std::vector<TokenLogprobs>(e->logprobs.begin() + first, e->logprobs.end());
}

Result<Finish> Decoder::finish(Sequence sequence) const {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  return e->finish;
}

Status Decoder::status(Sequence sequence) const {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  return e->status;
}

Result<Tensor> Decoder::logits(Sequence sequence) {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  if (e->slot < 0 || !e->prefilled)
    return refused(name_of(sequence) + " has no logits: expected a running sequence whose prompt was read");
  CF_TRY_ASSIGN(ModelRunner* const runner, state_->lease->runner());
  return runner->logits((*state_->lease)[e->slot]);
}

const ModelSpec& Decoder::model() const { return state_->model; }
DType Decoder::activation() const { return state_->activation; }

}  // namespace cf
