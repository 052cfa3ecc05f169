// What a sequence is given does not depend on the schedule: on the tokens of a step, on who else is there, on pages.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/decoder.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/model.hpp"
#include "tests/support/ahead_runner.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/schedules.hpp"
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
  /// A decoder of one slot, for sequences by themselves.
  Decoder alone() const {
    return Decoder(model({.capacity = kScheduleCapacity, .invariant = true}), {.step_tokens = 0});
  }
};

Ids ids_of(std::int64_t count, std::uint64_t seed) {
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(std::int32_t((seed * 31 + std::uint64_t(i) * i * 7 + 3) % 37));
  return ids;
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

TEST_CASE("Whole prompts share passes while no one runs, and a prompt that joins lets a step that runs ahead end",
          "[schedules]") {
  const Tiny tiny;
  const Model::Options options{.slots = 6, .capacity = 64, .activation = DType::f64};
  auto owned = std::make_unique<AheadRunner>(tiny.model(options), 16, 8);
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
  auto first = std::make_unique<AheadRunner>(tiny.model(options), 16, 8);
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
  auto second = std::make_unique<AheadRunner>(tiny.model(options), 16, 8);
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

TEST_CASE("In a thousand random schedules every sequence gets the ids that it has alone", "[schedules]") {
  omp_set_num_threads(1);  // the tiny model's work is less than that of a second thread
  const Tiny tiny;
  Alone alone(tiny.alone());
  const Counts counts = check_schedules(
      0, 1000, 1,
      [&](const Schedule& s) {
        return Decoder(tiny.model({.slots = s.slots,
                                   .capacity = kScheduleCapacity,
                                   .chunk = s.chunk,
                                   .invariant = true,
                                   .pages = s.pages,
                                   .page_entries = s.page_entries}),
                       s.decoder);
      },
      ids_of,
      // A third of the sequences have the log-probabilities of their ids, too.
      [](std::uint64_t id, std::int64_t tokens) {
        SequenceOptions o = sampled(id, tokens);
        if (id == 2) o.logprobs = 1;
        return o;
      },
      alone);
  CHECK(counts.forks > 500);
  CHECK(counts.given_up > 200);
  CHECK(counts.resumed > 100);
}

TEST_CASE("A thousand sequences decode beside each other in a pool that has a part of their capacity", "[schedules]") {
  omp_set_num_threads(1);
  const Tiny tiny;
  Alone alone(tiny.alone());
  // 1,024 slots of 32 entries would be 32,768: the pool has 12,288, and each sequence needs 7 to 11.
  Decoder d(tiny.model({.slots = 1024, .capacity = 32, .invariant = true, .pages = 3072, .page_entries = 4}));
  for (std::int64_t i = 0; i < 1024; ++i)
    taken(d.add(ids_of(4 + i % 5, std::uint64_t(i % 3)), sampled(std::uint64_t(i % 3), 4)));
  CHECK(taken(d.prefill()).size() == 1024);
  while (d.active()) CHECK(taken(d.decode()).size() == 1024);
  for (std::int64_t i = 0; i < 1024; ++i)
    CHECK(alone.fault(ids_of(4 + i % 5, std::uint64_t(i % 3)), sampled(std::uint64_t(i % 3), 4), taken(d.ids(i)), {},
                      true) == "");
}
