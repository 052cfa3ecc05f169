#include "core/model/memorizer.hpp"

#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/model/slot_lengths.hpp"
#include "core/tensor.hpp"

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "memorize: " + std::move(what)); }

}  // namespace

struct Memorizer::State {
  struct Sequence {
    std::int64_t place;
    std::vector<std::int32_t> ids;     // the sequence's own
    std::vector<std::int32_t> made{};  // those made of its continuation
    std::int32_t equal = 0, prefix = 0;
  };

  /// Begins or goes on with a sequence, with room for `extra` ids beside those that it lacks.
  Status begin(Sequence sequence, std::int64_t extra = 0) {
    std::vector<std::int32_t> prompt(sequence.ids.begin(), sequence.ids.begin() + std::ptrdiff_t(options.context));
    prompt.insert(prompt.end(), sequence.made.begin(), sequence.made.end());
    const std::int64_t left = options.continuation - std::int64_t(sequence.made.size()) + extra;
    CF_TRY_ASSIGN(const Decoder::Sequence number, decoder.add(prompt, {.max_new_tokens = left}));
    sequences.emplace(number, std::move(sequence));
    return {};
  }
  /// Appends an id to a sequence, and returns its result where it has ended.
  std::optional<Memorized> put(Sequence& sequence, std::int32_t id) const;
  /// Takes the id that the decoder has made.
  Status take(Decoder::Sequence number, std::int32_t id, std::vector<Memorized>& ended);
  /// The highest logit's id, of equal ones the lowest, among those that may be chosen.
  std::int32_t best_allowed(const Tensor& logits) const;

  State(std::shared_ptr<SlotLease> slots, MemorizeOptions o)
      : decoder(std::move(slots)), options(std::move(o)), never(options.never.begin(), options.never.end()) {}
  Decoder decoder;
  MemorizeOptions options;
  std::set<std::int32_t> never;
  std::unordered_map<Decoder::Sequence, Sequence> sequences;
};

std::int32_t Memorizer::State::best_allowed(const Tensor& logits) const {
  std::int32_t best = -1;
  double highest = 0;
  for (std::int64_t id = 0; id < logits.size(); ++id) {
    const double logit = load_element(logits.data(), logits.dtype(), id);
    if (never.contains(std::int32_t(id)) || (best >= 0 && !(logit > highest))) continue;
    best = std::int32_t(id);
    highest = logit;
  }
  return best;
}

std::optional<Memorized> Memorizer::State::put(Sequence& s, std::int32_t id) const {
  const bool is_equal = id == s.ids[std::size_t(options.context) + s.made.size()];
  s.prefix += is_equal && s.prefix == std::int32_t(s.made.size());
  s.equal += is_equal;
  s.made.push_back(id);
  if (options.exact_only && !is_equal) return Memorized{s.place, -1, s.prefix};
  if (std::int64_t(s.made.size()) < options.continuation) return std::nullopt;
  return Memorized{s.place, s.equal, s.prefix};
}

Status Memorizer::State::take(Decoder::Sequence number, std::int32_t id, std::vector<Memorized>& ended) {
  const auto found = sequences.find(number);
  if (!never.contains(id)) {
    const std::optional<Memorized> made = put(found->second, id);
    if (!made) return {};
    ended.push_back(*made);
    sequences.erase(found);
    return decoder.drop(number);
  }
  // Its logits say which id comes in its place, and the sequence goes on behind that one.
  CF_TRY_ASSIGN(const Finish finish, decoder.finish(number));
  const bool is_last = finish != Finish::running;  // with room for one more id its logits can be read
  Tensor logits;
  if (!is_last) {
    CF_TRY_ASSIGN(logits, decoder.logits(number));
  }
  CF_TRY(decoder.drop(number));
  Sequence sequence = std::move(found->second);
  sequences.erase(found);
  if (is_last) return begin(std::move(sequence), 1);
  if (const std::optional<Memorized> made = put(sequence, best_allowed(logits))) {
    ended.push_back(*made);
    return {};
  }
  return begin(std::move(sequence));
}

Memorizer::Memorizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Memorizer::Memorizer(Memorizer&&) noexcept = default;
Memorizer& Memorizer::operator=(Memorizer&&) noexcept = default;
Memorizer::~Memorizer() = default;

Result<Memorizer> Memorizer::create(std::shared_ptr<SlotLease> slots, MemorizeOptions options) {
  for (const auto& [name, size] :
       {std::pair("context", options.context), std::pair("continuation", options.continuation)})
    if (size < 1) return refused(std::string(name) + ": expected at least 1, got " + std::to_string(size));
  CF_TRY_ASSIGN(const ModelRunner* const runner, slots->runner());
  const std::int64_t vocab = runner->model().shape.vocab_size;
  CF_TRY(check_ids("memorize", "never", options.never, vocab));
  auto state = std::make_unique<State>(std::move(slots), std::move(options));
  if (std::int64_t(state->never.size()) == vocab) return refused("never: expected an id that may be chosen, got none");
  return Memorizer(std::move(state));
}

Status Memorizer::add(std::int64_t place, std::span<const std::int32_t> ids) {
  const std::int64_t length = state_->options.context + state_->options.continuation;
  const std::string name = "sequence " + std::to_string(place);
  if (std::int64_t(ids.size()) != length)
    return refused(name + ": expected " + std::to_string(length) + " ids, got " + std::to_string(ids.size()));
  CF_TRY(check_ids("memorize", name, ids, state_->decoder.model().shape.vocab_size));
  return state_->begin({.place = place, .ids = {ids.begin(), ids.end()}});
}

std::int64_t Memorizer::running() const { return std::int64_t(state_->sequences.size()); }

Result<std::vector<Memorized>> Memorizer::step() {
  State& s = *state_;
  CF_TRY_ASSIGN(const std::vector<Decoder::Emitted> emitted, s.decoder.decode(1));
  std::vector<Memorized> ended;
  for (const auto& [sequence, id] : emitted) CF_TRY(s.take(sequence, id, ended));
  for (const Decoder::Sequence number : s.decoder.ended()) {
    CF_TRY_ASSIGN(const Finish finish, s.decoder.finish(number));
    if (finish != Finish::failed) continue;
    const Status why = s.decoder.status(number);
    return Status::error(why.code(), "sequence " + std::to_string(s.sequences.at(number).place) + ": " + why.message());
  }
  return ended;
}

}  // namespace cf
