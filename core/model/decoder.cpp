#include "core/model/decoder.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
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
  bool shares = false;                    // pages with others that begin alike
  std::int64_t slot = -1;                 // the lease's; -1 while the sequence waits, and once it has ended
  std::int64_t read = 0;                  // tokens that have entries in the slot
  bool runs = false;                      // whether an id was chosen behind all that was read
  std::vector<std::int32_t> draft{};      // of the next step
  DraftLength draft_length{};             // kept where the sequence loses its slot
  bool no_draft = false;                  // whether the next step has none in any case
  Tensor last_logits{};                   // of the last id, where a draft was verified; else the slot has them
  DraftCounts counts{};
  Finish finish = Finish::running;
  Status status{};

  std::int64_t size() const { return std::int64_t(tokens.size()); }
  std::int64_t emitted() const { return size() - std::int64_t(prompt_size); }
  bool is_read_now() const { return slot >= 0 && !runs; }
};

/// The number of tokens that two sequences begin with alike.
std::int64_t common_prefix(const Entry& a, const Entry& b) {
  const std::size_t n = std::min(a.tokens.size(), b.tokens.size());
  return std::mismatch(a.tokens.begin(), a.tokens.begin() + std::ptrdiff_t(n), b.tokens.begin()).first -
         a.tokens.begin();
}

/// Rows [first, first + count) of a matrix, and one of them.
ConstAnyView<2> rows_of(const Tensor& matrix, std::int64_t first, std::int64_t count) {
  ConstAnyView<2> rows = matrix.view<2>();
  rows.data = static_cast<const std::byte*>(rows.data) + first * rows.shape[1] * std::int64_t(size_bytes(rows.dtype));
  rows.shape[0] = count;
  return rows;
}
ConstAnyView<1> row_of(const ConstAnyView<2>& matrix, std::int64_t row) {
  const std::int64_t bytes = matrix.shape[1] * std::int64_t(size_bytes(matrix.dtype));
  return {static_cast<const std::byte*>(matrix.data) + row * bytes, {matrix.shape[1]}, matrix.dtype};
}

/// A step: its runs with their ids, and whose they are.
struct Plan {
  std::vector<Run> runs{};
  std::vector<std::int32_t> ids{};
  std::vector<Decoder::Sequence> sequences{};
  std::vector<std::int64_t> rows{};  // by run: of logits for the host, which a run with a draft has one of a token
  bool leaves_prompts = false;       // to the step behind this one

  /// Whether a run has a draft.
  bool verifies() const {
    return std::any_of(rows.begin(), rows.end(), [](std::int64_t n) { return n > 0; });
  }
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
  std::int64_t step_tokens;  // 0: whole prompts
  std::int64_t pass_tokens;  // of whole prompts that are read together
  bool whole_alone;          // whether prompts are read whole where no sequence runs
  bool share_prefixes;
  std::int64_t exact_tokens;  // that a run has at most which verifies a draft; below 2: none can
  std::map<Sequence, Entry> entries{};
  std::deque<Sequence> waiting{};  // the oldest first; all are younger than those in slots
  std::vector<bool> taken;         // by slot
  Tensor rows{};                   // of logits, for the runs with drafts
  bool lacked_room = false;        // whether the prompt that came next in the last step that read prompts had no room
  Sequence next = 0;

  State(std::shared_ptr<SlotLease> l, const ModelRunner& runner, const DecoderOptions& options)
      : lease(std::move(l)),
        model(runner.model()),
        activation(runner.activation()),
        limit(runner.limit()),
        step_tokens(std::max<std::int64_t>(0, options.step_tokens.value_or(runner.preferred_step_tokens()))),
        pass_tokens(runner.pass_tokens()),
        whole_alone(!options.step_tokens && pass_tokens > 0),
        share_prefixes(options.share_prefixes),
        exact_tokens(exact_run_tokens(runner)),
        taken(std::size_t(lease->slots())) {}

  Result<const Entry*> find(Sequence sequence) const {
    const auto found = entries.find(sequence);
    if (found == entries.end()) return refused(name_of(sequence) + " is unknown or was dropped");
    return &found->second;
  }

  Result<Sequence> add(Entry e) {
    const std::int64_t vocab_size = model.shape.vocab_size;
    CF_TRY(check_ids("decoder", "stop", e.options.stop, vocab_size));
    CF_TRY(e.options.sampling.validate());
    if (e.options.max_new_tokens < 1)
      return refused("max_new_tokens: expected at least 1, got " + std::to_string(e.options.max_new_tokens));
    CF_TRY(e.options.changes.validate(vocab_size));
    if (e.options.changes.min_new_tokens > e.options.max_new_tokens)
      return refused("min_new_tokens: expected at most max_new_tokens, " + std::to_string(e.options.max_new_tokens) +
                     ", got " + std::to_string(e.options.changes.min_new_tokens));
    if (e.options.logprobs && (*e.options.logprobs < 0 || *e.options.logprobs > vocab_size))
      return refused("logprobs: expected 0 to " + std::to_string(vocab_size) + " alternatives, got " +
                     std::to_string(*e.options.logprobs));
    if (e.options.draft_tokens < 1 || e.options.draft_tokens > kMostDraft)
      return refused("draft_tokens: expected 1 to " + std::to_string(kMostDraft) + ", got " +
                     std::to_string(e.options.draft_tokens));
    if (e.options.draft && exact_tokens < 2)
      return refused(
          "draft: expected a model that gives a token the same bits in a step of any size, on one device with "
          "`invariant` or on the CPU in float32 with up to 8 slots, got one that does not");
    e.prompt_size = e.tokens.size();
    e.draft_length = DraftLength(e.options.draft_tokens);
    entries.emplace(next, std::move(e));
    waiting.push_back(next);
    admit();
    return next++;
  }

  /// Takes a sequence's slot away.
  void leave_slot(Entry& e) {
    if (e.slot >= 0) {
      if (const Result<ModelRunner*> runner = lease->runner()) (*runner)->release((*lease)[e.slot]);
      taken[std::size_t(e.slot)] = false;
    }
    e.slot = -1;
    e.read = 0;
    e.runs = false;
    e.draft = {};
    e.last_logits = {};
  }

  void end(Entry& e, Finish finish, Status status = {}) {
    leave_slot(e);
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

  /// What is asked for a sequence's next id; `left` as in ModelRunner::Draw.
  ChoiceRequest request_of(const Entry& e, std::int64_t left) const {
    return {.draw = {.slot = (*lease)[e.slot],
                     .sampling = e.options.sampling,
                     .sequence = e.options.id,
                     .position = e.size(),
                     .history = e.tokens,
                     .left = left,
                     .stop = e.options.stop},
            .prompt_size = e.prompt_size,
            .changes = &e.options.changes,
            .logprobs = e.options.logprobs};
  }

  /// Gives a sequence its next id, and ends it where that is its last, or where there is none.
  void take(Sequence sequence, Entry& e, Choice choice, std::vector<Emitted>& emitted) {
    const Result<std::int32_t>& id = choice.id;
    if (!id)
      return end(e, Finish::failed,
                 Status::error(id.status().code(), "decoder: " + name_of(sequence) + ": " + id.status().message()));
    e.tokens.push_back(*id);
    if (e.options.logprobs) e.logprobs.push_back(std::move(choice.logprobs));
    emitted.push_back({sequence, *id});
    if (std::find(e.options.stop.begin(), e.options.stop.end(), *id) != e.options.stop.end())
      end(e, Finish::stop);
    else if (e.emitted() >= e.options.max_new_tokens)
      end(e, Finish::length);
  }

  /// Chooses an id for each of the sequences, whose slots have logits, and ends those whose last id it is. The next step
  /// is theirs alone, or not.
  void choose(ModelRunner& runner, std::span<const Sequence> chosen, bool alone, std::vector<Emitted>& emitted) {
    std::vector<ChoiceRequest> requests;
    for (Sequence s : chosen) {
      Entry& e = entries.at(s);
      e.last_logits = {};
      // Where there was a draft the next step may have one: the runner need not begin one of the id alone.
      const bool may_run_ahead = alone && e.draft.empty();
      requests.push_back(request_of(e, may_run_ahead ? e.options.max_new_tokens - e.emitted() - 1 : 0));
    }
    std::vector<Choice> choices = choose_ids(runner, requests);
    for (std::size_t i = 0; i < chosen.size(); ++i)
      take(chosen[i], entries.at(chosen[i]), std::move(choices[i]), emitted);
  }

  /// Chooses the ids of a sequence whose draft has its rows of logits, (ids and one, vocab): up to the first that is not
  /// the draft's.
  void verify(ModelRunner& runner, Sequence sequence, ConstAnyView<2> logits, std::vector<Emitted>& emitted) {
    Entry& e = entries.at(sequence);
    const std::vector<std::int32_t> draft = std::exchange(e.draft, {});
    ++e.counts.steps;
    e.counts.drafted += std::int64_t(draft.size());
    const std::int64_t accepted_before = e.counts.accepted;
    for (std::size_t i = 0; i <= draft.size(); ++i) {
      ChoiceRequest request = request_of(e, 0);
      const auto row = row_of(logits, std::int64_t(i));
      request.logits = row;
      Choice choice = std::move(choose_ids(runner, std::span(&request, 1)).front());
      if (!choice.id && e.options.changes.none()) {
        e.no_draft = true;  // the runner, which makes the same logits again, knows more of why
        break;
      }
      const bool accepted = choice.id && i < draft.size() && *choice.id == draft[i];
      if (accepted) ++e.counts.accepted;
      take(sequence, e, std::move(choice), emitted);
      if (e.finish != Finish::running) return;
      if (accepted) continue;
      e.last_logits = Tensor(row.dtype, {row.size()});
      std::memcpy(e.last_logits.data(), row.data, std::size_t(row.bytes()));
      break;
    }
    e.draft_length.verified(std::int64_t(draft.size()), e.counts.accepted - accepted_before);
    e.read = e.size() - 1;  // what lies behind it is replaced
  }

  /// The sequences that have an id behind what was read of them.
  std::vector<Sequence> running() const {
    std::vector<Sequence> running;
    for (const auto& [sequence, e] : entries)
      if (e.runs) running.push_back(sequence);
    return running;
  }

  /// Whether any sequence has a slot and tokens that were not read yet.
  bool waits_to_be_read() const {
    return std::any_of(entries.begin(), entries.end(), [](const auto& entry) { return entry.second.is_read_now(); });
  }

  /// Before the first token of a sequence is read: shares the entries of one that begins alike. False where the
  /// sequence waits for that one to be read.
  bool share(ModelRunner& runner, Sequence sequence) {
    Entry& e = entries.at(sequence);
    const std::int64_t page = runner.page_entries();
    if (e.read > 0 || page == 0 || !(e.shares || share_prefixes)) return true;
    const Entry* source = nullptr;
    std::int64_t most = 0;
    for (const auto& [s, other] : entries) {
      if (s >= sequence) break;
      if (other.slot < 0) continue;
      std::int64_t alike = std::min(common_prefix(e, other), e.size() - 1);
      if (!other.is_read_now()) alike = std::min(alike, other.read);
      if (alike < e.size() - 1) alike -= alike % page;
      if (alike > most) source = &other, most = alike;
    }
    if (!source) return true;
    if (source->read < most) return false;
    if (runner.fork((*lease)[source->slot], (*lease)[e.slot], most)) e.read = most;
    return true;
  }

  /// Makes the next `count` tokens of a sequence a part of a step.
  void append(Plan& plan, Sequence sequence, std::int64_t count) const {
    const Entry& e = entries.at(sequence);
    plan.runs.push_back({.sequence = (*lease)[e.slot], .first_position = e.read, .count = count});
    const auto first = e.tokens.begin() + e.read;
    plan.ids.insert(plan.ids.end(), first, first + count);
    plan.sequences.push_back(sequence);
    plan.rows.push_back(0);
  }

  /// Asks for the drafts of running sequences. A draft leaves room for the id that is chosen behind it. Pieces of prompts
  /// come first: a step that has some has no drafts.
  void make_drafts(std::vector<Sequence>& running, bool with_prompts) {
    std::int64_t room =
        step_tokens == 0 ? std::numeric_limits<std::int64_t>::max() : step_tokens - std::int64_t(running.size());
    if (with_prompts && !lacked_room && waits_to_be_read()) room = 0;
    std::erase_if(running, [&](Sequence s) {
      Entry& e = entries.at(s);
      e.draft.clear();
      if (!e.options.draft || std::exchange(e.no_draft, false)) return false;
      std::int64_t most = std::min({e.options.draft_tokens, exact_tokens - 1, limit.most - e.size(),
                                    e.options.max_new_tokens - e.emitted() - 1, room});
      if (most > 0 && e.options.draft_adapts) most = std::min(most, e.draft_length.next());
      if (most < 1) return false;
      Result<std::vector<std::int32_t>> made = e.options.draft(e.tokens, most);
      Status status = made.status();
      if (status) status = check_ids("draft", "ids", *made, model.shape.vocab_size);
      if (!status) {
        end(e, Finish::failed, Status::error(status.code(), "decoder: " + name_of(s) + ": " + status.message()));
        return true;
      }
      e.draft = std::move(*made);
      e.draft.resize(std::min(e.draft.size(), std::size_t(most)));
      room -= std::int64_t(e.draft.size());
      return false;
    });
  }

  /// Adds the drafts of the sequences to a step that continues them.
  void append_drafts(Plan& plan) const {
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i < plan.runs.size(); ++i) {
      const std::vector<std::int32_t>& draft = entries.at(plan.sequences[i]).draft;
      ids.push_back(plan.ids[i]);
      ids.insert(ids.end(), draft.begin(), draft.end());
      plan.runs[i].count += std::int64_t(draft.size());
      plan.rows[i] = draft.empty() ? 0 : plan.runs[i].count;
    }
    plan.ids = std::move(ids);
  }

  /// Adds prompts to a step, the oldest first: pieces up to step_tokens in all, or whole prompts up to pass_tokens, and
  /// the first one in any case. One is begun, and gone on with, where there is room for all that is left of it.
  Status append_prompts(ModelRunner& runner, Plan& plan) {
    const bool are_whole = step_tokens == 0 || (whole_alone && plan.runs.empty());
    const std::int64_t most = are_whole ? pass_tokens : std::max<std::int64_t>(1, step_tokens - tokens_of(plan.runs));
    lacked_room = false;
    for (std::int64_t tokens = 0; const auto& [sequence, e] : entries) {
      if (!e.is_read_now() || !share(runner, sequence)) continue;
      const std::int64_t rest = e.size() - e.read;
      if (are_whole && tokens > 0 && rest > most - tokens) break;
      std::vector<Run> with_all = plan.runs;
      with_all.push_back({.sequence = (*lease)[e.slot], .first_position = e.read, .count = rest});
      if (Status room = runner.check_room(with_all); !room) {
        // The prompt waits for the room of a sequence that ends. Where none runs, that will not come.
        if (room.code() != Code::out_of_memory || (plan.runs.empty() && running().empty())) return room;
        lacked_room = true;
        break;
      }
      append(plan, sequence, are_whole ? rest : std::min(rest, most - tokens));
      tokens += plan.runs.back().count;
      if (tokens >= most) break;
    }
    return {};
  }

  /// Takes the slot of the youngest sequence that has entries, which waits for pages. False where that would be the
  /// oldest that has a slot: nothing that this decoder holds makes room for it.
  bool give_up_youngest(const Status& why) {
    const auto has_slot = [](const auto& entry) { return entry.second.slot >= 0; };
    const auto oldest = std::find_if(entries.begin(), entries.end(), has_slot);
    const auto youngest = std::find_if(entries.rbegin(), entries.rend(),
                                       [&](const auto& entry) { return has_slot(entry) && entry.second.read > 0; });
    if (youngest == entries.rend() || youngest->first == oldest->first) return false;
    // Whoever is younger and has a slot has no entries, and waits behind this one.
    for (auto e = entries.rbegin(); e->first >= youngest->first; ++e) {
      if (!has_slot(*e)) continue;
      leave_slot(e->second);
      waiting.push_front(e->first);
      if (e->first == youngest->first) {
        e->second.status = Status::error(why.code(), "decoder: " + name_of(e->first) + " waits: " + why.message());
        return true;
      }
    }
    return false;
  }

  /// The next step, of these sequences with their drafts and of prompts. Where there is no room for it, it has no drafts;
  /// then the youngest sequences give up their slots. It is empty where nothing is to be done, or prompts have no room
  /// before others end.
  Result<Plan> plan(ModelRunner& runner, std::vector<Sequence> continued, bool with_prompts) {
    const auto has_draft = [&](Sequence s) { return !entries.at(s).draft.empty(); };
    for (bool with_drafts = std::any_of(continued.begin(), continued.end(), has_draft);;) {
      Plan plan;
      for (Sequence s : continued) append(plan, s, 1);
      // A step that the device is at work on is not thrown away for drafts or prompts, which have the next one.
      const bool reads = with_prompts && !lacked_room && waits_to_be_read();
      const bool is_ahead = (with_drafts || reads) && runner.runs_ahead(plan.runs, plan.ids);
      plan.leaves_prompts = reads && is_ahead;
      if (with_drafts && !is_ahead) append_drafts(plan);
      Status status = plan.runs.empty() ? Status() : runner.check_room(plan.runs);
      if (status && with_prompts && !plan.leaves_prompts) status = append_prompts(runner, plan);
      // Whoever has begun to share a page made its owner need a copy.
      if (status && with_prompts && !plan.runs.empty()) status = runner.check_room(plan.runs);
      if (status) return plan;
      if (status.code() == Code::out_of_memory && plan.verifies()) {
        with_drafts = false;
        continue;
      }
      if (status.code() != Code::out_of_memory || !give_up_youngest(status)) return status;
      std::erase_if(continued, [&](Sequence s) { return !entries.at(s).runs; });
    }
  }

  /// What the runs of a step make for the host.
  StepLogits logits_of(std::span<const std::int64_t> rows_of_runs) {
    const std::int64_t n = std::accumulate(rows_of_runs.begin(), rows_of_runs.end(), std::int64_t(0));
    if (!rows || rows.shape()[0] < n) rows = Tensor(activation, {n, model.shape.vocab_size});
    AnyView<2> to = rows.view<2>();
    to.shape[0] = n;
    return {.rows = rows_of_runs, .to = to};
  }

  /// One step; false where there was nothing to do.
  Result<bool> step(std::span<const Sequence> running, bool with_prompts, std::vector<Emitted>& emitted) {
    std::vector<Sequence> continued;
    for (Sequence s : running) {
      Entry& e = entries.at(s);
      if (!e.runs) continue;
      if (e.size() > limit.most)
        end(e, Finish::failed,
            refused(name_of(s) + ": " + std::string(limit.name) + " of " + std::to_string(limit.most) +
                    " entries is reached after " + std::to_string(e.emitted()) + " new tokens"));
      else
        continued.push_back(s);
    }
    make_drafts(continued, with_prompts);
    CF_TRY_ASSIGN(ModelRunner* const runner, lease->runner());
    CF_TRY_ASSIGN(const Plan next, plan(*runner, std::move(continued), with_prompts));
    if (next.runs.empty()) return false;
    const bool verifies = next.verifies();
    CF_TRY(runner->run(next.runs, next.ids, verifies ? logits_of(next.rows) : StepLogits{}));
    bool reads = next.leaves_prompts;
    std::vector<Sequence> chosen;
    std::int64_t row = 0;
    for (std::size_t i = 0; i < next.runs.size(); ++i) {
      if (const std::int64_t n = next.rows[i]; n > 0) {
        verify(*runner, next.sequences[i], rows_of(rows, row, n), emitted);
        row += n;
        continue;
      }
      Entry& e = entries.at(next.sequences[i]);
      reads |= !e.runs;
      e.read += next.runs[i].count;
      if (e.read < e.size()) continue;
      e.runs = true;
      e.status = {};
      chosen.push_back(next.sequences[i]);
    }
    // Where prompts are being read, the next step has more of them; where drafts are verified, others run beside these.
    choose(*runner, chosen, !verifies && !(reads && step_tokens > 0 && waits_to_be_read()), emitted);
    return true;
  }

  /// Reads all prompts that have a slot, as far as there is room.
  Status prefill(std::vector<Emitted>& emitted) {
    admit();
    for (;;) {
      CF_TRY_ASSIGN(const bool worked, step({}, true, emitted));
      if (!worked) return {};
    }
  }

  /// Gives each running sequence an id, and reads prompts: pieces beside the running sequences, or all of them whole.
  Status turn(std::vector<Emitted>& emitted) {
    // Those that ran before the prompts are read: a turn gives each sequence one id.
    const std::vector<Sequence> before = running();
    if (step_tokens == 0 || (whole_alone && before.empty())) {
      CF_TRY(prefill(emitted));
      return step(before, false, emitted).status();
    }
    admit();
    return step(before, true, emitted).status();
  }
};

Decoder::Decoder(std::unique_ptr<ModelRunner> runner, const DecoderOptions& options)
    : Decoder(SlotLease::of_all(std::move(runner)), options) {}
Decoder::Decoder(std::shared_ptr<SlotLease> slots, const DecoderOptions& options) {
  const ModelRunner& runner = **slots->runner();
  state_ = std::make_unique<State>(std::move(slots), runner, options);
}
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;
Decoder::~Decoder() = default;

Result<Decoder::Sequence> Decoder::add(std::span<const std::int32_t> prompt, SequenceOptions options) {
  State& s = *state_;
  if (prompt.empty()) return refused("prompt: expected at least one id, got none");
  if (std::int64_t(prompt.size()) > s.limit.most)
    return refused("prompt: expected at most " + std::to_string(s.limit.most) + " ids, " + std::string(s.limit.name) +
                   ", got " + std::to_string(prompt.size()));
  CF_TRY(check_ids("decoder", "prompt", prompt, s.model.shape.vocab_size));
  return s.add({.options = std::move(options), .tokens = {prompt.begin(), prompt.end()}});
}

Result<Decoder::Sequence> Decoder::fork(Sequence sequence, SequenceOptions options,
                                        std::optional<std::int64_t> tokens) {
  State& s = *state_;
  CF_TRY_ASSIGN(const Entry* const e, s.find(sequence));
  const std::int64_t n = tokens.value_or(std::int64_t(e->prompt_size)), most = std::min(e->size(), s.limit.most);
  if (n < 1 || n > most)
    return refused("tokens: expected 1 to " + std::to_string(most) + " of " + name_of(sequence) + ", got " +
                   std::to_string(n));
  CF_TRY_ASSIGN(
      const Sequence forked,
      s.add({.options = std::move(options), .tokens = {e->tokens.begin(), e->tokens.begin() + n}, .shares = true}));
  if (s.entries.at(forked).slot >= 0) {
    CF_TRY_ASSIGN(ModelRunner* const runner, s.lease->runner());
    s.share(*runner, forked);  // now, as long as the entries are there
  }
  return forked;
}

Result<std::vector<Decoder::Emitted>> Decoder::prefill() {
  std::vector<Emitted> emitted;
  CF_TRY(state_->prefill(emitted));
  return emitted;
}

Result<std::vector<Decoder::Emitted>> Decoder::decode(std::int64_t steps) {
  if (steps < 1) return refused("steps: expected at least 1, got " + std::to_string(steps));
  std::vector<Emitted> emitted;
  for (std::int64_t i = 0; i < steps && active(); ++i) CF_TRY(state_->turn(emitted));
  return emitted;
}

Status Decoder::drop(Sequence sequence) {
  CF_TRY(state_->find(sequence).status());
  const auto found = state_->entries.find(sequence);
  std::erase(state_->waiting, sequence);
  state_->leave_slot(found->second);
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

Result<DraftCounts> Decoder::drafts(Sequence sequence) const {
  CF_TRY_ASSIGN(const Entry* const e, state_->find(sequence));
  return e->counts;
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
  if (!e->runs) return refused(name_of(sequence) + " has no logits: expected a running sequence whose prompt was read");
  CF_TRY_ASSIGN(ModelRunner* const runner, state_->lease->runner());
  return e->last_logits ? e->last_logits.clone() : runner->logits((*state_->lease)[e->slot]);
}

const ModelSpec& Decoder::model() const { return state_->model; }
DType Decoder::activation() const { return state_->activation; }

}  // namespace cf
