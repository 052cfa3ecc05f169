#include "core/model/decoder.hpp"

#include <algorithm>
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
  std::int64_t slot = -1;  // -1 once the sequence has ended
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
  std::unique_ptr<ModelRunner> runner;
  std::map<Sequence, Entry> entries{};
  std::vector<bool> taken;  // by slot
  Sequence next = 0;

  explicit State(std::unique_ptr<ModelRunner> r) : runner(std::move(r)), taken(std::size_t(runner->slots())) {}

  Result<const Entry*> find(Sequence sequence) const {
    const auto found = entries.find(sequence);
    if (found == entries.end()) return refused(name_of(sequence) + " is unknown or was dropped");
    return &found->second;
  }

  void end(Entry& e, Finish finish, Status status = {}) {
    if (e.slot >= 0) {
      runner->release(e.slot);
      taken[std::size_t(e.slot)] = false;
    }
    e.slot = -1;
    e.finish = finish;
    e.status = std::move(status);
  }

  /// Chooses an id for each of the sequences, whose slots have logits, and ends those whose last id it is.
  void choose(std::span<const Sequence> chosen, std::vector<Emitted>& emitted) {
    std::vector<ModelRunner::Draw> draws;
    for (Sequence s : chosen) {
      const Entry& e = entries.at(s);
      draws.push_back({.slot = e.slot,
                       .sampling = e.options.sampling,
                       .sequence = e.options.id,
                       .position = std::int64_t(e.tokens.size()),
                       .history = e.tokens,
                       .left = e.options.max_new_tokens - e.emitted() - 1,
                       .stop = e.options.stop});
    }
    const std::vector<Result<std::int32_t>> ids = runner->choose(draws);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      Entry& e = entries.at(chosen[i]);
      if (!ids[i]) {
        end(e, Finish::failed,
            Status::error(ids[i].status().code(), "decoder: " + name_of(chosen[i]) + ": " + ids[i].status().message()));
        continue;
      }
      e.tokens.push_back(*ids[i]);
      emitted.push_back({chosen[i], *ids[i]});
      if (std::find(e.options.stop.begin(), e.options.stop.end(), *ids[i]) != e.options.stop.end())
        end(e, Finish::stop);
      else if (e.emitted() >= e.options.max_new_tokens)
        end(e, Finish::length);
    }
  }

  Status prefill(std::vector<Emitted>& emitted) {
    for (auto& [sequence, e] : entries) {
      if (e.slot < 0 || e.prefilled) continue;
      CF_TRY(runner->prefill(e.slot, 0, e.tokens));
      e.prefilled = true;
      choose(std::span(&sequence, 1), emitted);
    }
    return {};
  }

  Status step(std::span<const Sequence> running, std::vector<Emitted>& emitted) {
    const EntryLimit limit = entry_limit(runner->model(), runner->capacity());
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
      tokens.push_back({.slot = e.slot, .id = e.tokens.back(), .position = std::int64_t(e.tokens.size()) - 1});
      stepped.push_back(s);
    }
    if (tokens.empty()) return {};
    CF_TRY(runner->step(tokens));
    choose(stepped, emitted);
    return {};
  }
};

Decoder::Decoder(std::unique_ptr<ModelRunner> runner) : state_(std::make_unique<State>(std::move(runner))) {}
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;
Decoder::~Decoder() = default;

Result<Decoder::Sequence> Decoder::add(std::span<const std::int32_t> prompt, SequenceOptions options) {
  State& s = *state_;
  const std::int64_t vocab_size = s.runner->model().shape.vocab_size;
  const EntryLimit limit = entry_limit(s.runner->model(), s.runner->capacity());
  if (prompt.empty()) return refused("prompt: expected at least one id, got none");
  if (std::int64_t(prompt.size()) > limit.most)
    return refused("prompt: expected at most " + std::to_string(limit.most) + " ids, " + std::string(limit.name) +
                   ", got " + std::to_string(prompt.size()));
  CF_TRY(check_ids("decoder", "prompt", prompt, vocab_size));
  CF_TRY(check_ids("decoder", "stop", options.stop, vocab_size));
  CF_TRY(options.sampling.validate());
  if (options.max_new_tokens < 1)
    return refused("max_new_tokens: expected at least 1, got " + std::to_string(options.max_new_tokens));
  const auto slot = std::find(s.taken.begin(), s.taken.end(), false);
  if (slot == s.taken.end())
    return refused("no slot is free: expected at most " + std::to_string(s.taken.size()) + " running sequences");
  *slot = true;
  s.entries.emplace(s.next, Entry{.options = std::move(options),
                                  .tokens = {prompt.begin(), prompt.end()},
                                  .prompt_size = prompt.size(),
                                  .slot = slot - s.taken.begin()});
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
  state_->end(found->second, Finish::running);
  state_->entries.erase(found);
  return {};
}

bool Decoder::active() const {
  return std::any_of(state_->taken.begin(), state_->taken.end(), [](bool t) { return t; });
}

std::int64_t Decoder::free_slots() const { return std::count(state_->taken.begin(), state_->taken.end(), false); }

Result<std::vector<std::int32_t>> Decoder::ids(Sequence sequence) const {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  return std::vector<std::int32_t>(e->tokens.begin() + std::ptrdiff_t(e->prompt_size), e->tokens.end());
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
  return state_->runner->logits(e->slot);
}

const ModelRunner& Decoder::runner() const { return *state_->runner; }

}  // namespace cf
