// The pipeline's table of events, without a GPU: random sequences of events on a device of this file, which runs
// launches as late or as far ahead as it likes, give the ids and logits of a runner that never runs ahead.
#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda/serve/pipeline.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using cuda::LogitsBuffer;
using cuda::Phase;
using cuda::Pipeline;
using cuda::PipelineEvent;
using Token = ModelRunner::Token;
using Draw = ModelRunner::Draw;
using Ids = std::vector<std::int32_t>;
using Logits = std::uint64_t;  // of a slot, in place of a row

constexpr std::int32_t kVocab = 11;
constexpr std::int32_t kNoId = -1;
constexpr std::size_t kMostStopIds = 2;

void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s);
}

std::uint64_t mix(std::uint64_t h, std::uint64_t x) {
  h = (h ^ x) * 0x9e3779b97f4a7c15u;
  return h ^ h >> 29;
}

/// What a model makes of a sequence's entries.
Logits logits_of(const Ids& entries) {
  std::uint64_t h = entries.size();
  for (std::int32_t id : entries) h = mix(h, std::uint64_t(id));
  return h;
}

/// The choice among these logits; none of them in one case of 60, as among NaNs.
std::int32_t choice(Logits logits, const Sampling& sampling, std::uint64_t sequence, std::int64_t position) {
  if (logits % 60 == 0) return kNoId;
  if (sampling.greedy()) return std::int32_t(logits % kVocab);
  return std::int32_t(mix(mix(mix(logits, sampling.seed), sequence), std::uint64_t(position)) % kVocab);
}

/// A device whose launches of many tokens run when someone waits for them, and a little further.
class Device final : public cuda::PipelineDevice {
 public:
  Device(std::int64_t slots, std::int64_t capacity, std::mt19937& random)
      : capacity_(capacity), random_(random), slots_(std::size_t(slots)) {
    for (auto& s : slots_) s.position = capacity;
  }

  Status place(std::span<const Token> tokens) override {
    ++placed_;
    drain();
    for (Slot& s : slots_) s.position = capacity_;
    for (const Token& t : tokens) {
      at(t.slot).id = t.id;
      at(t.slot).position = t.position;
    }
    return {};
  }
  Result<bool> make_room(std::span<const Token>) override { return has_room(); }
  Result<bool> make_room_for_launch(std::span<const Run> runs) override {
    if (!has_room()) return false;
    room_.assign(runs.begin(), runs.end());
    return true;
  }
  Status run(cuda::Start start, LogitsBuffer to) override {
    drain();
    if (start == cuda::Start::chooses)
      sample(to == LogitsBuffer::even_steps ? LogitsBuffer::odd_steps : LogitsBuffer::even_steps);
    if (start != cuda::Start::placed) follow();
    for (Slot& s : slots_) append(s, to);
    return {};
  }
  Status keep(std::int64_t slot, LogitsBuffer from, std::int64_t length) override {
    drain();
    at(slot).logits[0] = at(slot).logits[std::size_t(from)];
    at(slot).prompt_length = length;
    return {};
  }
  Status prepare_choice(LogitsBuffer from, std::span<const Draw> draws) override {
    drain();
    for (Slot& s : slots_) s.settings[std::size_t(from)].reset();
    for (const Draw& d : draws) {
      at(d.slot).settings[std::size_t(from)] = {d.sampling, d.sequence};
      at(d.slot).told.reset();
    }
    return {};
  }
  Status choose(LogitsBuffer from) override {
    drain();
    sample(from);
    return {};
  }
  Status await(std::span<const Draw> draws, std::span<std::int32_t> ids) override {
    for (std::size_t i = 0; i < draws.size(); ++i) {
      if (!at(draws[i].slot).told) return Status::error(Code::device_error, "a choice that was never made");
      ids[i] = *at(draws[i].slot).told;
    }
    return {};
  }
  Result<unsigned> launch(std::int64_t count, LogitsBuffer to, std::span<const cuda::SlotEnd> ends) override {
    if (count < 1 || pending_.size() == 4) return Status::error(Code::device_error, "a launch that does not fit");
    // There is room for what each slot appends, and nothing more was asked for.
    std::size_t appending = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const std::int64_t tokens = std::min(ends[i].tokens, count);
      if (tokens < 1) continue;
      ++appending;
      if (std::ranges::none_of(room_, [&](const Run& r) { return r.sequence == std::int64_t(i) && r.count == tokens; }))
        return Status::error(Code::device_error, "a launch without room");
    }
    if (appending != room_.size()) return Status::error(Code::device_error, "room that no slot needs");
    Launch l{.first = next_number_, .end = next_number_ + unsigned(count), .to = to};
    for (const cuda::SlotEnd& e : ends)
      l.ends.push_back({.tokens = e.tokens, .stop = Ids(e.stop_ids.begin(), e.stop_ids.end())});
    l.next = l.first;
    next_number_ = l.end;
    pending_.push_back(std::move(l));
    return pending_.back().first;
  }
  Status await_launched(unsigned number, std::span<const Draw> draws, std::span<std::int32_t> ids) override {
    while (!made_.contains(number) && !pending_.empty()) advance();
    for (auto further = random_() % 5; further > 0 && !pending_.empty(); --further) advance();
    const auto found = made_.find(number);
    if (found == made_.end()) return Status::error(Code::device_error, "a token that no launch makes");
    for (std::size_t i = 0; i < draws.size(); ++i) ids[i] = found->second[std::size_t(draws[i].slot)];
    return {};
  }
  void end_before(unsigned number) override { end_before_ = std::max(end_before_, number); }

  /// From now on the runner sometimes has no cache entries for a step or a launch that it would run ahead.
  void run_short_of_room() { always_room_ = false; }
  /// The calls of place() so far.
  int placed() const { return placed_; }
  /// A prompt's pass.
  void read(std::int64_t slot, std::int64_t first, const Ids& ids, bool makes_logits) {
    drain();
    Slot& s = at(slot);
    for (std::size_t i = 0; i < ids.size(); ++i) put(s, first + std::int64_t(i), ids[i]);
    if (!makes_logits) return;
    s.prompt_length = first + std::int64_t(ids.size());
    s.position = s.prompt_length - 1;
    s.logits[0] = logits_of({s.cache.begin(), s.cache.begin() + s.prompt_length});
  }
  Logits logits(std::int64_t slot, LogitsBuffer buffer) {
    drain();
    return at(slot).logits[std::size_t(buffer)];
  }

 private:
  struct Setting {
    Sampling sampling;
    std::uint64_t sequence;
  };
  struct Slot {
    Ids cache{};
    std::int32_t id = 0, chosen = 0;
    std::int64_t position = 0, prompt_length = 0;
    std::array<Logits, cuda::kLogitsBuffers> logits{1, 2, 3};
    std::array<std::optional<Setting>, cuda::kLogitsBuffers> settings{};
    std::optional<std::int32_t> told{};
  };
  struct End {
    std::int64_t tokens;
    Ids stop;
    bool ended = false;
  };
  struct Launch {
    unsigned first, end;
    LogitsBuffer to;
    std::vector<End> ends{};
    unsigned next = 0;
  };

  bool has_room() { return always_room_ || random_() % 4 > 0; }
  Slot& at(std::int64_t slot) { return slots_[std::size_t(slot)]; }
  static void put(Slot& s, std::int64_t position, std::int32_t id) {
    if (s.cache.size() <= std::size_t(position)) s.cache.resize(std::size_t(position) + 1, 0);
    s.cache[std::size_t(position)] = id;
  }
  void append(Slot& s, LogitsBuffer to) {
    Logits& row = s.logits[std::size_t(to)];
    if (s.position >= capacity_) {
      row = random_();  // a step writes a row of every slot
      return;
    }
    put(s, s.position, std::max(s.id, 0));
    row = logits_of({s.cache.begin(), s.cache.begin() + s.position + 1});
  }
  void follow() {
    for (Slot& s : slots_) {
      s.id = s.chosen;
      s.position = std::min(s.position + 1, capacity_);
    }
  }
  void sample(LogitsBuffer from) {
    for (Slot& s : slots_) {
      const auto b = std::size_t(from);
      if (!s.settings[b]) continue;
      const std::int64_t position = from == LogitsBuffer::prompts ? s.prompt_length : s.position + 1;
      s.chosen = choice(s.logits[b], s.settings[b]->sampling, s.settings[b]->sequence, position);
      s.told = s.chosen;
    }
  }
  static bool stops(const End& e, std::int32_t id) {
    return std::find(e.stop.begin(), e.stop.end(), id) != e.stop.end();
  }

  /// Runs the next token of the first launch, or ends that launch.
  void advance() {
    Launch& l = pending_.front();
    if (l.next == l.first) follow();
    const bool asked = end_before_ > l.first && end_before_ < l.end + 1 && l.next >= end_before_;
    bool live = false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      End& e = l.ends[i];
      Slot& s = slots_[i];
      e.ended = e.ended || s.position >= capacity_ || e.tokens <= std::int64_t(l.next - l.first) ||
                (l.next == l.first && stops(e, s.id));
      if (e.ended) s.position = capacity_;
      live = live || !e.ended;
    }
    if (!live || l.next == l.end || (asked && random_() % 3 == 0)) {
      // Between two tokens the slots have the position of the next one.
      if (l.next != l.first)
        for (Slot& s : slots_)
          if (s.position < capacity_) --s.position;
      pending_.pop_front();
      return;
    }
    Ids& made = made_[l.next];
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& s = slots_[i];
      append(s, l.to);
      made.push_back(l.ends[i].ended ? std::int32_t(random_() % kVocab)
                                     : choice(s.logits[std::size_t(l.to)], {}, 0, 0));
      if (l.ends[i].ended) continue;
      s.chosen = made.back();
      s.id = std::max(s.chosen, 0);
      l.ends[i].ended = stops(l.ends[i], s.chosen);
      ++s.position;
    }
    ++l.next;
  }
  void drain() {
    while (!pending_.empty()) advance();
  }

  std::int64_t capacity_;
  std::mt19937& random_;
  std::vector<Slot> slots_;
  std::deque<Launch> pending_;
  std::map<unsigned, Ids> made_;  // by a token's number, and slot
  unsigned next_number_ = 5, end_before_ = 0;
  int placed_ = 0;
  bool always_room_ = true;
  std::vector<Run> room_;  // of the next launch
};

/// What the pipeline must look like: each slot's entries, and the logits of the last one.
struct Simple {
  Ids entries{};
  bool has_logits = false;
};

/// One random life of a pipeline. Returns the phases that public calls were made in.
class Life {
 public:
  Life(unsigned seed, std::int64_t slots, bool launches, std::int64_t window)
      : random_(seed),
        device_(slots, kCapacity, random_),
        pipeline_(device_, slots, spec(window), kCapacity),
        simple_(std::size_t(slots)),
        most_(window ? window : kCapacity) {
    pipeline_.set_launches({.launches = launches, .most_stop_ids = kMostStopIds});
    if (seed % 2) device_.run_short_of_room();
  }

  void live(int events) {
    for (int n = 0; n < events; ++n) {
      seen_.insert({std::string(event()), pipeline_.phase()});
      for (std::size_t i = 0; i < simple_.size(); ++i)
        REQUIRE(pipeline_.lengths()[std::int64_t(i)] == std::int64_t(simple_[i].entries.size()));
    }
  }
  /// Events with the phase after them.
  const std::set<std::pair<std::string, Phase>>& seen() const { return seen_; }

 private:
  static constexpr std::int64_t kCapacity = 90;
  static ModelSpec spec(std::int64_t window) {
    ModelSpec s;
    s.traits.window = window;
    return s;
  }
  std::uint64_t below(std::uint64_t n) { return random_() % n; }
  bool chance(int percent) { return below(100) < std::uint64_t(percent); }
  Simple& at(std::int64_t slot) { return simple_[std::size_t(slot)]; }
  std::int64_t slots() const { return std::int64_t(simple_.size()); }
  std::vector<std::int64_t> slots_with_logits() const {
    std::vector<std::int64_t> found;
    for (std::size_t i = 0; i < simple_.size(); ++i)
      if (simple_[i].has_logits) found.push_back(std::int64_t(i));
    return found;
  }
  std::int32_t expected(const Draw& d) {
    return choice(logits_of(at(d.slot).entries), d.sampling, d.sequence, d.position);
  }

  std::string_view event() {
    const auto what = below(100);
    if (what < 4) return prompt();
    if (what < 6) return pass();
    if (what < 8) return read();
    if (what < 10) return release();
    if (what < 12) return give_up();
    if (what < 14) return refuse();
    if (what < 24) return step();
    if (what < 30) return choose();
    if (what < 36) return decode_with_host();
    return decode();
  }

  /// What a decoder does: choose for its sequences, and step with what was chosen, for a while. Others have theirs.
  std::string_view decode() {
    if (slots_with_logits().empty()) return prompt();
    const bool plain = chance(70);
    std::set<std::int64_t> others;
    if (chance(40))
      for (std::int64_t slot = 0; slot < slots(); ++slot)
        if (chance(50)) others.insert(slot);
    for (auto n = 1 + below(40); n > 0; --n) {
      std::vector<Draw> draws;
      for (std::int64_t slot : slots_with_logits())
        if (!others.contains(slot)) draws.push_back(draw(slot, plain));
      if (draws.empty()) break;
      take(draws);
      std::vector<Token> tokens;
      for (const Draw& d : draws) {
        const std::int32_t id = pipeline_.chosen(d.slot);
        const bool ends = id == kNoId || d.left == 0 || std::find(d.stop.begin(), d.stop.end(), id) != d.stop.end() ||
                          d.position >= most_;
        if (ends && !chance(10))
          forget(d.slot);
        else if (d.position < most_)
          tokens.push_back({d.slot, std::max(id, 0), d.position});
      }
      advance(tokens);
    }
    return "decode";
  }

  /// What a decoder does where the host chooses for some sequences: it reads their logits, lets the others' ids be
  /// chosen as if they were the last ones, and steps with all.
  std::string_view decode_with_host() {
    const bool plain = chance(70);
    std::set<std::int64_t> by_host;
    for (std::int64_t slot = 0; slot < slots(); ++slot)
      if (chance(50)) by_host.insert(slot);
    for (auto n = 1 + below(20); n > 0; --n) {
      std::vector<std::int64_t> read;
      std::vector<Draw> draws;
      std::vector<Token> tokens;
      for (std::int64_t slot : slots_with_logits()) {
        if (by_host.contains(slot))
          read.push_back(slot);
        else
          draws.push_back(draw(slot, plain));
      }
      if (!read.empty())
        for (Draw& d : draws) d.left = 0;
      require_ok(pipeline_.read_logits(read));
      for (std::int64_t slot : read) {
        REQUIRE(device_.logits(slot, pipeline_.buffer_of(slot)) == logits_of(at(slot).entries));
        tokens.push_back({slot, std::int32_t(below(kVocab)), pipeline_.lengths()[slot]});
      }
      take(draws);
      for (const Draw& d : draws) tokens.push_back({d.slot, std::max(pipeline_.chosen(d.slot), 0), d.position});
      std::erase_if(tokens, [&](const Token& t) { return t.position >= most_; });
      if (tokens.empty()) break;
      advance(tokens);
    }
    return "decode with the host";
  }

  Draw draw(std::int64_t slot, bool plain) {
    Draw d{.slot = slot,
           .sampling = {},
           .sequence = std::uint64_t(slot),
           .position = pipeline_.lengths()[slot],
           .history = {}};
    if (!plain && chance(70)) d.sampling = {.temperature = 1, .seed = below(3)};
    // A sequence's end stays the same unless the caller changes its mind.
    if (!limits_.contains(slot) || chance(2)) limits_[slot] = {std::int64_t(d.position) + std::int64_t(below(70)), {}};
    if (chance(2)) limits_[slot].second = Ids(below(4), std::int32_t(below(kVocab)));
    d.left = std::max<std::int64_t>(0, limits_[slot].first - d.position);
    d.stop = limits_[slot].second;
    return d;
  }
  void take(const std::vector<Draw>& draws) {
    require_ok(pipeline_.choose(draws));
    for (const Draw& d : draws) REQUIRE(pipeline_.chosen(d.slot) == expected(d));
  }
  void advance(const std::vector<Token>& tokens) {
    const bool is_ahead = pipeline_.foresees(tokens);
    const Phase before = pipeline_.phase();
    if (is_ahead) REQUIRE((before == Phase::ahead || before == Phase::launched));
    const int placed = device_.placed();
    require_ok(pipeline_.step(tokens));
    REQUIRE((device_.placed() == placed) == (is_ahead || tokens.empty()));
    for (const Token& t : tokens) {
      at(t.slot).entries.resize(std::size_t(t.position));
      at(t.slot).entries.push_back(t.id);
      at(t.slot).has_logits = true;
    }
  }
  void forget(std::int64_t slot) {
    pipeline_.release(slot);
    simple_[std::size_t(slot)] = {};
    limits_.erase(slot);
  }

  std::string_view prompt() {
    const auto slot = std::int64_t(below(std::uint64_t(slots())));
    if (chance(50)) forget(slot);
    Simple& s = at(slot);
    const auto first = below(s.entries.size() + 1);
    const auto most = std::uint64_t(most_) - first;
    if (most == 0) return release();
    Ids ids(1 + below(std::min<std::uint64_t>(most, 12)));
    for (auto& id : ids) id = std::int32_t(below(kVocab));
    const bool own = chance(85);
    if (!own) require_ok(pipeline_.restore(slot));  // forward() leaves the slot's own logits
    require_ok(pipeline_.begin_prompt(slot, std::int64_t(first), std::int64_t(ids.size())));
    device_.read(slot, std::int64_t(first), ids, own);
    s.entries.resize(first);
    s.entries.insert(s.entries.end(), ids.begin(), ids.end());
    require_ok(pipeline_.extend(slot, std::int64_t(s.entries.size()), ids.back()));
    if (own) require_ok(pipeline_.end_prompt(slot));
    s.has_logits = own;
    return own ? "prompt" : "forward";
  }
  /// Prompts, pieces of prompts that make no logits, and tokens of sequences that go on, together.
  std::string_view pass() {
    std::vector<Run> runs;
    std::vector<Ids> ids;
    for (std::int64_t slot = 0; slot < slots(); ++slot) {
      if (chance(30)) continue;
      const auto length = std::int64_t(at(slot).entries.size());
      const bool goes_on = at(slot).has_logits && chance(60);
      const std::int64_t first = goes_on ? length : std::int64_t(below(std::uint64_t(length) + 1));
      if (first == most_) continue;
      const std::int64_t count = goes_on ? 1 : 1 + std::int64_t(below(std::uint64_t(std::min(most_ - first, 12l))));
      runs.push_back({.sequence = slot, .first_position = first, .count = count});
      Ids& own = ids.emplace_back(std::size_t(count));
      for (auto& id : own) id = std::int32_t(below(kVocab));
    }
    if (runs.empty()) return give_up();
    require_ok(pipeline_.begin_pass(runs));
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Run& run = runs[i];
      const bool own = run.count == 1 || chance(85);
      device_.read(run.sequence, run.first_position, ids[i], own);
      Simple& s = at(run.sequence);
      s.entries.resize(std::size_t(run.first_position));
      s.entries.insert(s.entries.end(), ids[i].begin(), ids[i].end());
      s.has_logits = own;
      require_ok(pipeline_.extend(run.sequence, std::int64_t(s.entries.size()), ids[i].back()));
    }
    for (const Run& run : runs)
      if (at(run.sequence).has_logits) require_ok(pipeline_.end_prompt(run.sequence));
    return "pass";
  }
  std::string_view read() {
    std::vector<std::int64_t> slots = slots_with_logits();
    std::erase_if(slots, [&](std::int64_t) { return chance(40); });
    require_ok(pipeline_.read_logits(slots));
    for (std::int64_t slot : slots)
      REQUIRE(device_.logits(slot, pipeline_.buffer_of(slot)) == logits_of(at(slot).entries));
    return "read logits";
  }
  std::string_view release() {
    forget(std::int64_t(below(std::uint64_t(slots()))));
    return "release";
  }
  std::string_view give_up() {
    pipeline_.give_up();
    return "give up";
  }
  std::string_view step() {
    std::vector<Token> tokens;
    for (std::int64_t slot : slots_with_logits()) {
      if (chance(30)) continue;
      const auto length = std::int64_t(at(slot).entries.size());
      std::int64_t position = chance(80) ? length : std::int64_t(below(std::uint64_t(length) + 1));
      if (position == most_) position = most_ - 1;
      const std::int32_t chosen = pipeline_.chosen(slot);
      tokens.push_back({slot, chance(50) && chosen >= 0 ? chosen : std::int32_t(below(kVocab)), position});
    }
    advance(tokens);
    return "step";
  }
  std::string_view choose() {
    std::vector<Draw> draws;
    const bool plain = chance(50);
    for (std::int64_t slot : slots_with_logits())
      if (chance(70)) draws.push_back(draw(slot, plain));
    take(draws);
    if (chance(30)) take(draws);
    return "choose";
  }
  /// Calls that are refused, and change nothing.
  std::string_view refuse() {
    const auto fault = [](const Status& s, std::string_view part) {
      return refusal_fault(s, Code::invalid_argument, {part});
    };
    const Phase before = pipeline_.phase();
    const std::vector<Token> none{{slots(), 1, 0}}, twice{{0, 1, 0}, {0, 2, 0}};
    REQUIRE(fault(pipeline_.step(none), "slot: expected 0 to") == "");
    REQUIRE(fault(pipeline_.step(twice), "expected one run a step, got two") == "");
    REQUIRE(fault(pipeline_.begin_prompt(0, 0, most_ + 1), "expected at most") == "");
    const std::vector<Run> long_run{{.sequence = 0, .count = most_ + 1}}, same{{.sequence = 0}, {.sequence = 0}};
    REQUIRE(fault(pipeline_.begin_pass(long_run), "expected at most") == "");
    REQUIRE(fault(pipeline_.begin_pass(same), "expected one run a step, got two") == "");
    const Draw late{.slot = 0, .sampling = {}, .sequence = 0, .position = pipeline_.lengths()[0] + 1, .history = {}};
    REQUIRE(fault(pipeline_.choose(std::span(&late, 1)), "expected a choice for position") == "");
    if (before != Phase::idle) {
      const std::string refused = "pipeline: 'end_prompt' is refused while " + std::string(to_string(before));
      REQUIRE(fault(pipeline_.end_prompt(0), refused) == "");
      REQUIRE(fault(pipeline_.extend(0, 1, 1), refused) == "");
    }
    REQUIRE(pipeline_.phase() == before);
    return "refused call";
  }

  std::mt19937 random_;
  Device device_;
  Pipeline pipeline_;
  std::vector<Simple> simple_;
  std::int64_t most_;
  std::map<std::int64_t, std::pair<std::int64_t, Ids>> limits_;  // by slot: the position of its last id, its stop ids
  std::set<std::pair<std::string, Phase>> seen_;
};

}  // namespace

TEST_CASE("random events give the ids and logits of a runner that never runs ahead", "[pipeline]") {
  std::set<std::pair<std::string, Phase>> seen;
  for (const bool launches : {false, true})
    for (const std::int64_t slots : {1, 2, 3, 8})
      for (const std::int64_t window : {0, 25})
        for (unsigned seed = 0; seed < 30; ++seed) {
          CAPTURE(launches, slots, window, seed);
          Life life(seed, slots, launches, window);
          life.live(200);
          seen.insert(life.seen().begin(), life.seen().end());
        }
  // Every phase was met behind the events that lead there, and the calls that end it.
  for (const char* const event : {"choose", "read logits", "release", "give up", "step", "decode", "refused call"})
    CHECK(seen.contains({event, Phase::placed}));
  for (const char* const event : {"prompt", "forward", "pass", "choose", "release", "give up", "decode"})
    CHECK(seen.contains({event, Phase::idle}));
  for (const char* const event : {"choose", "read logits", "release", "refused call"})
    CHECK(seen.contains({event, Phase::ahead}));
  for (const char* const event : {"choose", "release", "step", "decode", "refused call"})
    CHECK(seen.contains({event, Phase::launched}));
  for (const Phase phase : {Phase::ahead, Phase::launched}) CHECK(!seen.contains({"give up", phase}));
}

namespace {

/// A pipeline of one slot whose prompt was read.
struct One {
  explicit One(bool launches) {
    pipeline.set_launches({.launches = launches, .most_stop_ids = kMostStopIds});
    require_ok(pipeline.begin_prompt(0, 0, 2));
    device.read(0, 0, {1, 2}, true);
    require_ok(pipeline.extend(0, 2, 2));
    require_ok(pipeline.end_prompt(0));
  }
  void choose() {
    const Draw draw{
        .slot = 0, .sampling = {}, .sequence = 0, .position = pipeline.lengths()[0], .history = {}, .left = 50};
    require_ok(pipeline.choose(std::span(&draw, 1)));
  }
  void step() {
    const Token token{0, pipeline.chosen(0), pipeline.lengths()[0]};
    require_ok(pipeline.step(std::span(&token, 1)));
  }
  std::mt19937 random{1};
  Device device{1, 90, random};
  Pipeline pipeline{device, 1, ModelSpec{}, 90};
};

}  // namespace

TEST_CASE("the phases of a sequence that is decoded", "[pipeline]") {
  One single(false);
  CHECK(single.pipeline.phase() == Phase::placed);
  single.choose();
  CHECK(single.pipeline.phase() == Phase::ahead);
  single.step();
  CHECK(single.pipeline.phase() == Phase::placed);
  single.choose();
  single.pipeline.give_up();
  CHECK(single.pipeline.phase() == Phase::idle);
  single.step();
  CHECK(single.pipeline.phase() == Phase::placed);
  single.choose();
  single.pipeline.release(0);
  CHECK(single.pipeline.phase() == Phase::idle);

  One many(true);
  many.choose();
  CHECK(many.pipeline.phase() == Phase::launched);
  CHECK(!many.pipeline.foresees({}));
  many.step();
  CHECK(many.pipeline.phase() == Phase::launched);
  CHECK(refusal_fault(many.pipeline.end_prompt(0), Code::invalid_argument,
                      {"pipeline: 'end_prompt' is refused while launched"}) == "");
  // Whoever reads logits gets them, and launches of one token from then on.
  const std::int64_t slot = 0;
  require_ok(many.pipeline.read_logits(std::span(&slot, 1)));
  CHECK(many.pipeline.phase() == Phase::placed);
  many.choose();
  CHECK(many.pipeline.phase() == Phase::ahead);
}

TEST_CASE("the table of events: giving up is never refused, and ends what runs ahead", "[pipeline]") {
  using cuda::kTransitions;
  const auto after = [](PipelineEvent e, Phase p) { return kTransitions[std::size_t(e)][std::size_t(p)]; };
  for (int p = 0; p < cuda::kPhases; ++p) {
    const cuda::Phases phases = after(PipelineEvent::give_up, Phase(p));
    CHECK(!phases.empty());
    CHECK(!phases.has(Phase::ahead));
    CHECK(!phases.has(Phase::launched));
  }
  // Every other event happens to a pipeline that gave up, or takes what was foreseen.
  for (const PipelineEvent e : {PipelineEvent::begin_prompt, PipelineEvent::begin_pass, PipelineEvent::end_prompt,
                                PipelineEvent::place, PipelineEvent::choose}) {
    CHECK(!after(e, Phase::idle).empty());
    CHECK(after(e, Phase::ahead).empty());
    CHECK(after(e, Phase::launched).empty());
  }
  CHECK(after(PipelineEvent::take, Phase::idle).empty());
  CHECK(after(PipelineEvent::take, Phase::placed).empty());
  std::set<std::string> names;
  for (int e = 0; e < cuda::kPipelineEvents; ++e) names.insert(std::string(to_string(PipelineEvent(e))));
  CHECK(names.size() == std::size_t(cuda::kPipelineEvents));
}
