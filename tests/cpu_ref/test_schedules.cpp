// What a sequence is given does not depend on the schedule: on the tokens of a step, on who else is there, on pages.
#include <omp.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/decoder.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/taken.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using cpu_ref::Model;
using Ids = std::vector<std::int32_t>;
using Emitted = std::vector<Decoder::Emitted>;

/// One layer of width 32.
struct Tiny {
  ModelSpec spec;
  std::shared_ptr<OwnedModelWeights> weights;

  Tiny() {
    ModelConfig m;
    m.name = "tiny";
    m.hidden_size = 32;
    m.num_hidden_layers = 1;
    m.num_attention_heads = 2;
    m.intermediate_size = 64;
    m.vocab_size = 37;
    m.max_position_embeddings = 64;
    m.rotary_dim = 8;
    spec = m;
    weights = std::make_shared<OwnedModelWeights>(procedural_model(spec, DType::f16, 7));
  }
  std::unique_ptr<Model> model(const Model::Options& options) const {
    return taken(Model::create(spec, weights->weights, weights, options));
  }
};

Ids ids_of(std::int64_t count, std::uint64_t seed) {
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(std::int32_t((seed * 31 + std::uint64_t(i) * i * 7 + 3) % 37));
  return ids;
}

SequenceOptions sampled(std::uint64_t id, std::int64_t tokens) {
  return {.sampling = {.temperature = 1.2, .seed = 5}, .id = id, .max_new_tokens = tokens};
}

}  // namespace

TEST_CASE("Prompts are read in pieces beside running sequences, whose ids are the same for every step size",
          "[schedules]") {
  const Tiny tiny;
  const std::vector<std::int64_t> lengths{5, 1, 23, 9};
  std::vector<Ids> expected;
  for (std::int64_t step_tokens : {0, 1, 2, 7, 16, 64}) {
    CAPTURE(step_tokens);
    Decoder d(tiny.model({.slots = 3, .capacity = 64, .chunk = 16, .activation = DType::f64}),
              {.step_tokens = step_tokens});
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      taken(d.add(ids_of(lengths[i], i), sampled(i, 12)));
      taken(d.decode(2));
    }
    while (d.active()) taken(d.decode());
    std::vector<Ids> ids;
    for (std::size_t i = 0; i < lengths.size(); ++i) ids.push_back(taken(d.ids(Decoder::Sequence(i))));
    if (expected.empty()) expected = ids;
    CHECK(ids == expected);
  }
}

TEST_CASE("A long prompt stops no one: each step gives every running sequence an id", "[schedules]") {
  const Tiny tiny;
  Decoder d(tiny.model({.slots = 3, .capacity = 64}), {.step_tokens = 8});
  const auto first = taken(d.add(ids_of(3, 1))), second = taken(d.add(ids_of(4, 2)));
  CHECK(taken(d.prefill()).size() == 2);
  const auto late = taken(d.add(ids_of(40, 3)));
  // Six tokens of the prompt in each step: the seventh step reads the last four.
  for (int step = 0; step < 6; ++step) {
    const Emitted ids = taken(d.decode());
    REQUIRE(ids.size() == 2);
    CHECK(ids[0].sequence == first);
    CHECK(ids[1].sequence == second);
    CHECK(taken(d.ids(late)).empty());
    CHECK(refusal_fault(d.logits(late).status(), Code::invalid_argument, {"sequence 2 has no logits"}) == "");
  }
  CHECK(taken(d.decode()).size() == 3);
  CHECK(taken(d.ids(late)).size() == 1);
  CHECK(taken(d.decode()).size() == 3);
}

namespace {

/// A model that reads several prompts in a pass and runs ahead of a decoder's steps, as one on a GPU does. It keeps the
/// counts of each step's runs.
class AheadRunner final : public ModelRunner {
 public:
  explicit AheadRunner(std::unique_ptr<Model> model) : model_(std::move(model)) {}
  const ModelSpec& model() const override { return model_->model(); }
  std::int64_t slots() const override { return model_->slots(); }
  std::int64_t capacity() const override { return model_->capacity(); }
  DType activation() const override { return model_->activation(); }
  std::int64_t length(std::int64_t slot) const override { return model_->length(slot); }
  std::int64_t pass_tokens() const override { return 16; }
  std::int64_t preferred_step_tokens() const override { return 8; }
  bool runs_ahead(std::span<const Run> runs, std::span<const std::int32_t>) const override {
    return !ahead_.empty() && std::ranges::equal(runs, ahead_);
  }
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override {
    std::vector<std::int64_t>& counts = steps.emplace_back();
    for (const Run& r : runs) counts.push_back(r.count);
    ahead_.clear();
    return model_->run(runs, ids, logits);
  }
  std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) override {
    if (std::ranges::all_of(draws, [](const Draw& d) { return d.left > 0; }))
      for (const Draw& d : draws) ahead_.push_back({.sequence = d.slot, .first_position = d.position});
    return model_->choose(draws);
  }
  Result<Tensor> logits(std::int64_t slot) override { return model_->logits(slot); }
  void release(std::int64_t slot) override { model_->release(slot); }
  void watch(Visit visit) override { model_->watch(std::move(visit)); }
  void check_between(Check check) override { model_->check_between(std::move(check)); }
  Status fetch(const SiteTensor& tensor, void* to) override { return model_->fetch(tensor, to); }

  std::vector<std::vector<std::int64_t>> steps;

 private:
  std::unique_ptr<Model> model_;
  std::vector<Run> ahead_;
};

}  // namespace

TEST_CASE("Whole prompts share passes while no one runs, and a prompt that joins lets a step that runs ahead end",
          "[schedules]") {
  const Tiny tiny;
  const Model::Options options{.slots = 6, .capacity = 64, .activation = DType::f64};
  auto owned = std::make_unique<AheadRunner>(tiny.model(options));
  std::vector<std::vector<std::int64_t>>& steps = owned->steps;
  Decoder d(std::move(owned)), plain(tiny.model(options), {.step_tokens = 0});
  const auto took = [&](std::vector<std::vector<std::int64_t>> expected) {
    CHECK(steps == expected);
    steps.clear();
  };
  const std::vector<std::int64_t> lengths{5, 1, 9, 30, 3, 20};
  for (std::size_t i = 0; i < 5; ++i) taken(d.add(ids_of(lengths[i], i), sampled(i, 16)));
  CHECK(taken(d.prefill()).size() == 5);
  took({{5, 1, 9}, {30}, {3}});
  taken(d.decode(2));
  took({{1, 1, 1, 1, 1}, {1, 1, 1, 1, 1}});
  // A turn in which no one runs reads all prompts, too.
  auto first = std::make_unique<AheadRunner>(tiny.model(options));
  std::vector<std::vector<std::int64_t>>& turn = first->steps;
  Decoder idle(std::move(first));
  for (std::size_t i = 0; i < 4; ++i) taken(idle.add(ids_of(lengths[i], i), sampled(i, 2)));
  CHECK(taken(idle.decode(1)).size() == 4);
  CHECK(turn == std::vector<std::vector<std::int64_t>>{{5, 1, 9}, {30}});
  taken(d.add(ids_of(lengths[5], 5), sampled(5, 4)));
  CHECK(taken(d.decode(9)).size() == 5 * 9 + 2);
  took({{1, 1, 1, 1, 1},
        {1, 1, 1, 1, 1, 3},
        {1, 1, 1, 1, 1, 3},
        {1, 1, 1, 1, 1, 3},
        {1, 1, 1, 1, 1, 3},
        {1, 1, 1, 1, 1, 3},
        {1, 1, 1, 1, 1, 3},
        {1, 1, 1, 1, 1, 2},
        {1, 1, 1, 1, 1, 1}});
  while (d.active()) taken(d.decode());
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    CAPTURE(i);
    const auto s = taken(plain.add(ids_of(lengths[i], i), sampled(i, i == 5 ? 4 : 16)));
    while (plain.active()) taken(plain.decode());
    CHECK(taken(d.ids(std::int64_t(i))) == taken(plain.ids(s)));
  }
  // An explicit number of tokens is one for all steps.
  auto second = std::make_unique<AheadRunner>(tiny.model(options));
  std::vector<std::vector<std::int64_t>>& pieces = second->steps;
  Decoder cut(std::move(second), {.step_tokens = 8});
  for (std::size_t i = 0; i < 3; ++i) taken(cut.add(ids_of(lengths[i], i), sampled(i, 2)));
  CHECK(taken(cut.prefill()).size() == 3);
  CHECK(pieces == std::vector<std::vector<std::int64_t>>{{5, 1, 2}, {7}});
}

TEST_CASE("A fork is given what its tokens as a prompt are given, also without pages", "[schedules]") {
  const Tiny tiny;
  Decoder d(tiny.model({.slots = 4, .capacity = 64}));
  const auto first = taken(d.add(ids_of(9, 1), sampled(0, 8)));
  taken(d.decode(5));
  const auto sample = taken(d.fork(first, sampled(1, 8))), branch = taken(d.fork(first, sampled(2, 8), 12));
  Ids begun = ids_of(9, 1);
  for (std::int32_t id : taken(d.ids(first))) begun.push_back(id);
  begun.resize(12);
  const auto whole = taken(d.add(begun, sampled(2, 8)));
  const auto whole_sample = taken(d.add(ids_of(9, 1), sampled(1, 8)));
  while (d.active()) taken(d.decode());
  CHECK(taken(d.ids(branch)) == taken(d.ids(whole)));
  CHECK(taken(d.ids(sample)) == taken(d.ids(whole_sample)));
  CHECK(taken(d.ids(sample)) != taken(d.ids(first)));
  const auto refused = [&](const Result<Decoder::Sequence>& r, std::string_view text) {
    return refusal_fault(r.status(), Code::invalid_argument, {text});
  };
  CHECK(refused(d.fork(first, {}, 18), "tokens: expected 1 to 17 of sequence 0, got 18") == "");
  CHECK(refused(d.fork(first, {}, 0), "tokens: expected 1 to 17 of sequence 0, got 0") == "");
  CHECK(refused(d.fork(99), "sequence 99 is unknown or was dropped") == "");
  CHECK(refused(d.fork(first, {.stop = {37}}), "stop[0]: expected an id of 0 to 36, got 37") == "");
}

TEST_CASE("With invariant a token's bits do not depend on its step", "[schedules]") {
  const Tiny tiny;
  const Ids ids = ids_of(40, 3);
  const auto bits_after = [&](Model& model, std::int64_t piece) {
    for (std::int64_t first = 0; first < 40; first += piece)
      REQUIRE(model.prefill(1, first,
                            std::span(ids).subspan(std::size_t(first), std::size_t(std::min(piece, 40 - first)))));
    const Tensor logits = taken(model.logits(1));
    return std::string(static_cast<const char*>(logits.data()), logits.size_bytes());
  };
  const auto expected = bits_after(*tiny.model({.slots = 2, .capacity = 64, .invariant = true}), 40);
  for (std::int64_t chunk : {1, 5, 16, 64})
    for (std::int64_t piece : {1, 7, 9, 20, 40}) {
      CAPTURE(chunk, piece);
      CHECK(bits_after(*tiny.model({.slots = 2, .capacity = 64, .chunk = chunk, .invariant = true}), piece) ==
            expected);
    }
  // Beside other prompts and tokens, in one step.
  const auto model = tiny.model({.slots = 40, .capacity = 64, .chunk = 512, .invariant = true});
  std::vector<Run> runs;
  Ids fed;
  for (std::int64_t slot = 2; slot < 40; ++slot) {
    REQUIRE(model->prefill(slot, 0, ids_of(slot, 5)));
    runs.push_back({.sequence = slot, .first_position = slot, .count = 1 + slot % 3});
    for (std::int64_t i = 0; i < runs.back().count; ++i) fed.push_back(std::int32_t(slot % 37));
  }
  runs.insert(runs.begin() + 7, {.sequence = 1, .first_position = 0, .count = 40});
  std::int64_t before = 0;
  for (int i = 0; i < 7; ++i) before += runs[std::size_t(i)].count;
  fed.insert(fed.begin() + before, ids.begin(), ids.end());
  REQUIRE(model->run(runs, fed, {}));
  const Tensor logits = taken(model->logits(1));
  CHECK(std::string(static_cast<const char*>(logits.data()), logits.size_bytes()) == expected);
  CHECK(refusal_fault(
            Model::create(tiny.spec, tiny.weights->weights, tiny.weights, {.activation = DType::f64, .invariant = true})
                .status(),
            Code::invalid_argument, {"model: invariant: expected activations of float32, got float64"}) == "");
}

namespace {

/// What a user does with a decoder. Numbers are taken modulo what there is, so that any part of a list is a list too.
struct Operation {
  enum Kind { add, fork, decode, prefill, drop } kind;
  std::uint32_t a = 0, b = 0;
};
std::string to_string(const Operation& o) {
  static constexpr const char* names[] = {"add", "fork", "decode", "prefill", "drop"};
  return std::string(names[o.kind]) + "(" + std::to_string(o.a) + ", " + std::to_string(o.b) + ")";
}

/// A decoder of one schedule.
struct Schedule {
  Model::Options model{};
  DecoderOptions decoder{};
  std::vector<Operation> operations{};
};

Schedule random_schedule(std::mt19937& random) {
  const auto below = [&](std::uint32_t n) { return std::uint32_t(random() % n); };
  Schedule s;
  s.model = {.slots = 1 + below(5), .capacity = 32, .chunk = 1 + below(20), .invariant = true};
  if (below(4)) {
    s.model.page_entries = 1 + below(8);
    // From what one sequence needs to what all need.
    const std::int64_t one = (32 + s.model.page_entries - 1) / s.model.page_entries;
    s.model.pages = one + below(std::uint32_t(one * 2));
  }
  if (below(3)) s.decoder.step_tokens = below(3) ? 1 + below(24) : 0;
  s.decoder.share_prefixes = below(2);
  for (std::uint32_t n = 3 + below(16); n > 0; --n) {
    const std::uint32_t kind = below(10);
    s.operations.push_back({kind < 4   ? Operation::add
                            : kind < 6 ? Operation::fork
                            : kind < 8 ? Operation::decode
                            : kind < 9 ? Operation::prefill
                                       : Operation::drop,
                            std::uint32_t(random()), std::uint32_t(random())});
  }
  return s;
}

/// What each sequence should be given: its ids, alone in a model of one slot. By prompt and id.
class Alone {
 public:
  explicit Alone(const Tiny& tiny) : decoder_(tiny.model({.capacity = 32, .invariant = true}), {.step_tokens = 0}) {}
  const Ids& operator()(const Ids& prompt, const SequenceOptions& o) {
    const auto [found, is_new] = known_.try_emplace({prompt, o.id, o.max_new_tokens});
    if (is_new) {
      const auto s = taken(decoder_.add(prompt, o));
      while (decoder_.active()) taken(decoder_.decode());
      found->second = taken(decoder_.ids(s));
      REQUIRE(decoder_.drop(s));
    }
    return found->second;
  }

 private:
  Decoder decoder_;
  std::map<std::tuple<Ids, std::uint64_t, std::int64_t>, Ids> known_;
};

struct Counts {
  int forks = 0, given_up = 0, resumed = 0;
};

/// "" if every sequence of a schedule got the ids that it has alone; otherwise the first that did not.
std::string fault(const Tiny& tiny, const Schedule& schedule, Alone& alone, Counts& counts) {
  Decoder d(tiny.model(schedule.model), schedule.decoder);
  struct Sequence {
    Ids prompt;
    SequenceOptions options;
  };
  std::map<Decoder::Sequence, Sequence> living;
  const auto any = [&](std::uint32_t n) { return std::next(living.begin(), n % std::uint32_t(living.size())); };
  std::map<Decoder::Sequence, Ids> emitted;
  const auto take = [&](const Result<Emitted>& ids) -> std::string {
    if (!ids) return ids.status().message();
    for (const auto& e : *ids) emitted[e.sequence].push_back(e.id);
    for (const auto& [s, l] : living) {
      if (d.status(s) || taken(d.finish(s)) != Finish::running) continue;
      if (d.status(s).code() != Code::out_of_memory) return d.status(s).message();
      ++counts.given_up;
      counts.resumed += !taken(d.ids(s)).empty();
    }
    return "";
  };
  const auto check = [&](Decoder::Sequence s) -> std::string {
    const Ids& expected = alone(living.at(s).prompt, living.at(s).options);
    const Ids ids = taken(d.ids(s));
    const bool ended = taken(d.finish(s)) != Finish::running;
    if (ids != emitted[s]) return "sequence " + std::to_string(s) + " was not told all its ids";
    if (ids.size() > expected.size() || !std::equal(ids.begin(), ids.end(), expected.begin()) ||
        (ended && ids.size() != expected.size()))
      return "sequence " + std::to_string(s) + " has other ids than alone";
    return "";
  };
  for (const Operation& o : schedule.operations) {
    std::string wrong;
    const SequenceOptions options = sampled(o.b % 3, 1 + o.b / 3 % 9);
    switch (o.kind) {
      case Operation::add: {
        // Few prompts, some of which begin alike.
        const Ids prompt = ids_of(1 + o.a % 23, o.a / 23 % 3);
        living[taken(d.add(prompt, options))] = {prompt, options};
        break;
      }
      case Operation::fork: {
        if (living.empty()) break;
        const auto of = any(o.a);
        Ids tokens = of->second.prompt;
        const Ids ids = taken(d.ids(of->first));
        tokens.insert(tokens.end(), ids.begin(), ids.end());
        std::optional<std::int64_t> n;
        if (o.a / 64 % 2) n = 1 + std::int64_t(o.a / 128 % std::min<std::size_t>(tokens.size(), 23));
        tokens.resize(std::size_t(n.value_or(std::int64_t(of->second.prompt.size()))));
        living[taken(d.fork(of->first, options, n))] = {tokens, options};
        ++counts.forks;
        break;
      }
      case Operation::decode: wrong = take(d.decode(1 + o.a % 6)); break;
      case Operation::prefill: wrong = take(d.prefill()); break;
      case Operation::drop: {
        if (living.empty()) break;
        const auto of = any(o.a);
        wrong = check(of->first);
        if (!d.drop(of->first)) return "drop() refuses a sequence";
        living.erase(of);
      }
    }
    if (!wrong.empty()) return wrong;
  }
  for (int turns = 0; d.active(); ++turns) {
    if (turns == 2000) return "no sequence goes on";
    if (const std::string wrong = take(d.decode()); !wrong.empty()) return wrong;
  }
  for (const auto& [s, l] : living) {
    if (taken(d.finish(s)) != Finish::length) return "sequence " + std::to_string(s) + " did not reach its length";
    if (const std::string wrong = check(s); !wrong.empty()) return wrong;
  }
  return "";
}

/// The schedule without what its fault does not need.
Schedule shrunk(Schedule s, const std::function<bool(const Schedule&)>& is_faulty) {
  for (std::size_t i = 0; i < s.operations.size();) {
    Schedule less = s;
    less.operations.erase(less.operations.begin() + std::ptrdiff_t(i));
    if (is_faulty(less))
      s = less;
    else
      ++i;
  }
  return s;
}

}  // namespace

TEST_CASE("In a thousand random schedules every sequence gets the ids that it has alone", "[schedules]") {
  omp_set_num_threads(1);  // the tiny model's work is less than that of a second thread
  const Tiny tiny;
  Alone alone(tiny);
  std::mt19937 random(11);
  Counts counts;
  for (int round = 0; round < 1000; ++round) {
    const Schedule s = random_schedule(random);
    const std::string wrong = fault(tiny, s, alone, counts);
    if (wrong.empty()) continue;
    Counts ignored;
    const Schedule least = shrunk(s, [&](const Schedule& less) { return !fault(tiny, less, alone, ignored).empty(); });
    std::string text;
    for (const Operation& o : least.operations) text += to_string(o) + " ";
    FAIL(wrong << " in schedule " << round << ": " << s.model.slots << " slots, " << s.model.pages << " pages of "
               << s.model.page_entries << ", chunk " << s.model.chunk << ", step_tokens "
               << s.decoder.step_tokens.value_or(-1) << ", share_prefixes " << s.decoder.share_prefixes << ": "
               << text);
  }
  CHECK(counts.forks > 500);
  CHECK(counts.given_up > 200);
  CHECK(counts.resumed > 100);
}

TEST_CASE("A thousand sequences decode beside each other in a pool that has a part of their capacity", "[schedules]") {
  omp_set_num_threads(1);
  const Tiny tiny;
  Alone alone(tiny);
  // 1,024 slots of 32 entries would be 32,768: the pool has 12,288, and each sequence needs 7 to 11.
  Decoder d(tiny.model({.slots = 1024, .capacity = 32, .invariant = true, .pages = 3072, .page_entries = 4}));
  for (std::int64_t i = 0; i < 1024; ++i)
    taken(d.add(ids_of(4 + i % 5, std::uint64_t(i % 3)), sampled(std::uint64_t(i % 3), 4)));
  CHECK(taken(d.prefill()).size() == 1024);
  while (d.active()) CHECK(taken(d.decode()).size() == 1024);
  for (std::int64_t i = 0; i < 1024; ++i)
    CHECK(taken(d.ids(i)) == alone(ids_of(4 + i % 5, std::uint64_t(i % 3)), sampled(std::uint64_t(i % 3), 4)));
}
