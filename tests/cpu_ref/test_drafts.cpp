// What a sequence is given with drafts: what it is given without them, in fewer steps.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/host_sampler.hpp"
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

/// Two layers of width 32.
struct Small {
  static constexpr std::int32_t kVocab = 29;
  ModelSpec spec;
  std::shared_ptr<OwnedModelWeights> weights;

  Small() {
    omp_set_num_threads(1);  // the small model's work is less than that of a second thread
    ModelConfig m;
    m.name = "small";
    m.hidden_size = 32;
    m.num_hidden_layers = 2;
    m.num_attention_heads = 2;
    m.intermediate_size = 64;
    m.vocab_size = kVocab;
    m.max_position_embeddings = 96;
    m.rotary_dim = 8;
    spec = m;
    weights = std::make_shared<OwnedModelWeights>(procedural_model(spec, DType::f16, 7));
  }
  std::unique_ptr<Model> model(const Model::Options& options) const {
    return taken(Model::create(spec, weights->weights, weights, options));
  }
  Decoder decoder(const Model::Options& options, const DecoderOptions& how = {}) const {
    return Decoder(model(options), how);
  }
};

Ids ids_of(std::int64_t count, std::uint64_t seed) {
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i)
    ids.push_back(std::int32_t((seed * 31 + std::uint64_t(i) * std::uint64_t(i) * 7 + 3) % Small::kVocab));
  return ids;
}

/// What a sequence was given.
struct Given {
  Ids ids;
  std::vector<TokenLogprobs> logprobs;
  Finish finish;

  bool operator==(const Given& o) const {
    const auto same = [](const TokenLogprobs& a, const TokenLogprobs& b) {
      return a.logprob == b.logprob && a.top == b.top;
    };
    return ids == o.ids && finish == o.finish && std::ranges::equal(logprobs, o.logprobs, same);
  }
};
Given given_to(const Decoder& d, Decoder::Sequence s) {
  return {taken(d.ids(s)), taken(d.logprobs(s)), taken(d.finish(s))};
}
Given run(Decoder& d, const Ids& prompt, const SequenceOptions& options) {
  const auto s = taken(d.add(prompt, options));
  while (d.active()) taken(d.decode());
  return given_to(d, s);
}

/// A draft that knows what comes, but for the ids whose place behind the prompt `misses` divides.
Drafter oracle(const Ids& prompt, const Ids& ids, std::size_t misses) {
  return [=](std::span<const std::int32_t> tokens, std::int64_t most) -> Result<Ids> {
    Ids draft;
    for (std::size_t i = tokens.size() - prompt.size(); i < ids.size() && std::int64_t(draft.size()) < most; ++i)
      draft.push_back(misses > 0 && i % misses == 0 ? (ids[i] + 1) % Small::kVocab : ids[i]);
    return draft;
  };
}

const Sampling kDrawn{.temperature = 0.9, .top_k = 20, .top_p = 0.95, .seed = 5};

}  // namespace

TEST_CASE("A sequence is given with drafts what it is given without", "[draft]") {
  const Small small;
  const std::vector<Model::Options> models{
      {.slots = 1, .capacity = 64},
      {.slots = 8, .capacity = 64, .chunk = 4},
      {.slots = 3, .capacity = 64, .invariant = true},
      {.slots = 20, .capacity = 64, .chunk = 5, .invariant = true},
      {.slots = 2, .capacity = 64, .pages = 32, .page_entries = 4},
      {.slots = 2, .capacity = 64, .chunk = 5, .invariant = true, .pages = 32, .page_entries = 3},
      {.slots = 2, .chunk = 8, .window = 11, .sinks = 3},
      {.slots = 2, .chunk = 3, .window = 9},
  };
  std::vector<SequenceOptions> options(5);
  options[1].logprobs = 3;
  options[2].sampling = kDrawn;
  options[3].sampling = {.temperature = 1.4, .repetition_penalty = 1.2, .seed = 8};
  options[3].logprobs = 0;
  options[4].changes.logit_bias = {{2, 1.5f}};
  options[4].changes.frequency_penalty = 0.4;
  options[4].changes.min_new_tokens = 7;
  options[4].stop = {3, 4, 5, 6, 7, 8};
  std::int64_t steps = 0, accepted = 0;
  for (const Model::Options& model : models)
    for (SequenceOptions o : options) {
      o.id = 3;
      o.max_new_tokens = 24;
      const Ids prompt = ids_of(9, 2);
      CAPTURE(model.slots, model.chunk, model.invariant, model.pages, model.window, &o - options.data());
      Decoder plain = small.decoder(model);
      const Given expected = run(plain, prompt, o);
      const std::vector<std::pair<Drafter, std::int64_t>> drafters{{lookup_drafter(), 7},
                                                                   {lookup_drafter({.longest = 2, .shortest = 1}), 4},
                                                                   {oracle(prompt, expected.ids, 0), 1},
                                                                   {oracle(prompt, expected.ids, 0), 7},
                                                                   {oracle(prompt, expected.ids, 1), 7},
                                                                   {oracle(prompt, expected.ids, 5), 7}};
      for (const auto& [draft, tokens] : drafters)
        for (bool adapts : {false, true}) {
          o.draft = draft;
          o.draft_tokens = tokens;
          o.draft_adapts = adapts;
          Decoder d = small.decoder(model);
          CHECK(run(d, prompt, o) == expected);
          const DraftCounts counts = taken(d.drafts(0));
          CHECK(counts.accepted <= counts.drafted);
          CHECK(counts.drafted <= counts.steps * tokens);
          steps += counts.steps;
          accepted += counts.accepted;
        }
    }
  CHECK(steps > 2000);
  CHECK(accepted > 2000);
}

TEST_CASE("A draft that knows what comes takes one step for each run of its ids", "[draft]") {
  const Small small;
  const Ids prompt = ids_of(5, 1);
  SequenceOptions o{.max_new_tokens = 34};
  Decoder plain = small.decoder({.capacity = 64});
  const Ids ids = run(plain, prompt, o).ids;
  o.draft = oracle(prompt, ids, 0);
  for (bool adapts : {false, true}) {
    CAPTURE(adapts);
    o.draft_adapts = adapts;
    Decoder d = small.decoder({.capacity = 64});
    const auto s = taken(d.add(prompt, o));
    std::vector<std::size_t> made{taken(d.prefill()).size()};
    while (d.active()) made.push_back(taken(d.decode()).size());
    // 1 by the prompt; then those of a draft, and the id behind it; the last one is left to a step of its own.
    if (adapts) {
      CHECK(made == std::vector<std::size_t>{1, 3, 5, 8, 8, 8, 1});
      CHECK(taken(d.drafts(s)) == DraftCounts{.steps = 5, .drafted = 27, .accepted = 27});
    } else {
      CHECK(made == std::vector<std::size_t>{1, 8, 8, 8, 8, 1});
      CHECK(taken(d.drafts(s)) == DraftCounts{.steps = 4, .drafted = 28, .accepted = 28});
    }
    CHECK(taken(d.ids(s)) == ids);
  }
}

TEST_CASE("Drafts that are always wrong become rare", "[draft]") {
  const Small small;
  const Ids prompt = ids_of(5, 1);
  SequenceOptions o{.max_new_tokens = 80};
  Decoder plain = small.decoder({.capacity = 96});
  const Ids ids = run(plain, prompt, o).ids;
  o.draft = oracle(prompt, ids, 1);
  for (bool adapts : {false, true}) {
    CAPTURE(adapts);
    o.draft_adapts = adapts;
    Decoder d = small.decoder({.capacity = 96});
    CHECK(run(d, prompt, o).ids == ids);
    const DraftCounts counts = taken(d.drafts(0));
    CHECK(counts.accepted == 0);
    // Of the 79 steps behind the prompt the last has no room for a draft. Those with one: 1, 2, 7, 16, 33 and 66.
    CHECK(counts.steps == (adapts ? 6 : 78));
    CHECK(counts.drafted == (adapts ? 7 : 78 * 7 - 21));
  }
}

TEST_CASE("A sequence ends within a draft where it ends without one", "[draft]") {
  const Small small;
  const Ids prompt = ids_of(5, 1);
  Decoder plain = small.decoder({.capacity = 64});
  const Ids ids = run(plain, prompt, {.sampling = kDrawn, .max_new_tokens = 30}).ids;
  Decoder d = small.decoder({.capacity = 64});
  for (std::int64_t most = 1; most <= 20; ++most) {
    CAPTURE(most);
    SequenceOptions o{.sampling = kDrawn, .max_new_tokens = most, .draft = oracle(prompt, ids, 0)};
    const Given made = run(d, prompt, o);
    CHECK(made.ids == Ids(ids.begin(), ids.begin() + most));
    CHECK(made.finish == Finish::length);
    o.max_new_tokens = 30;
    o.stop = {ids[std::size_t(most)]};
    const Given stopped = run(d, prompt, o);
    const auto end = std::find(ids.begin(), ids.end(), ids[std::size_t(most)]);
    CHECK(stopped.ids == Ids(ids.begin(), end + 1));
    CHECK(stopped.finish == Finish::stop);
  }
  // The end of the slot's entries.
  Decoder full = small.decoder({.capacity = 20});
  SequenceOptions o{.sampling = kDrawn, .max_new_tokens = 30, .draft = oracle(prompt, ids, 0)};
  const auto s = taken(full.add(prompt, o));
  while (full.active()) taken(full.decode());
  CHECK(taken(full.ids(s)) == Ids(ids.begin(), ids.begin() + 16));
  CHECK(refusal_fault(full.status(s), Code::invalid_argument, {"of 20 entries is reached after 16 new tokens"}) == "");
}

TEST_CASE("In random schedules sequences with drafts get the ids that they have alone without", "[draft]") {
  const Small small;
  Alone alone(small.decoder({.capacity = kScheduleCapacity, .invariant = true}, {.step_tokens = 0}));
  const Counts counts = check_schedules(
      0, 60, 1,
      [&](const Schedule& s) {
        return small.decoder({.slots = s.slots,
                              .capacity = kScheduleCapacity,
                              .chunk = s.chunk,
                              .invariant = true,
                              .pages = s.pages,
                              .page_entries = s.page_entries},
                             s.decoder);
      },
      ids_of,
      // One has no drafts, one those of a lookup, one some of the most ids that are right now and then.
      [](std::uint64_t id, std::int64_t tokens) {
        SequenceOptions o = sampled(id, tokens);
        o.sampling.temperature = id == 0 ? 0.0 : 0.3;
        if (id == 1) o.draft = lookup_drafter({.longest = 2, .shortest = 1});
        if (id == 2) {
          o.logprobs = 1;
          o.draft_adapts = false;
          o.draft = [](std::span<const std::int32_t> so_far, std::int64_t most) -> Result<Ids> {
            return Ids(std::size_t(most), so_far.back());
          };
        }
        return o;
      },
      alone);
  CHECK(counts.forks > 30);
  CHECK(counts.given_up > 5);
}

namespace {

/// Pearson's chi-square of counts beside the probabilities of a row's kept tokens, and its degrees of freedom.
std::pair<double, double> chi_square(const std::vector<TokenProbability>& kept,
                                     const std::map<std::int32_t, int>& counts, int draws) {
  double sum = 0, rare = 0, rare_count = 0;
  int bins = 0, counted = 0;
  for (const auto& [id, probability] : kept) {
    const double expected = probability * draws, count = counts.contains(id) ? counts.at(id) : 0;
    counted += int(count);
    if (expected < 10) {
      rare += expected, rare_count += count;
      continue;
    }
    sum += (count - expected) * (count - expected) / expected;
    ++bins;
  }
  CHECK(counted == draws);
  if (rare >= 10) {
    sum += (rare_count - rare) * (rare_count - rare) / rare;
    ++bins;
  }
  return {sum, bins - 1};
}

}  // namespace

TEST_CASE("An id that a draft proposes is drawn with the model's probability, and so is every other id", "[draft]") {
  const Small small;
  const Sampling sampling{.temperature = 0.8, .top_k = 12, .seed = 11};
  const Ids prompt = ids_of(6, 4);
  // The first id is given; the second is what a draft proposes, always the same one.
  Decoder plain = small.decoder({.capacity = 16});
  const auto first = taken(plain.add(prompt, {.max_new_tokens = 3}));
  taken(plain.decode(2));
  const std::int32_t given = taken(plain.ids(first))[0];
  Ids begun = prompt;
  begun.push_back(given);
  const Tensor logits = taken(plain.logits(first));
  const std::span<const float> row(logits.as<float>(), Small::kVocab);
  const std::vector<TokenProbability> kept = taken(kept_tokens(row, sampling, begun));
  const TokenProbability proposed = *std::ranges::max_element(kept, {}, &TokenProbability::probability);
  REQUIRE(proposed.probability > 0.05);
  REQUIRE(proposed.probability < 0.95);

  constexpr int draws = 2000;
  std::map<std::int32_t, int> counts;
  std::int64_t accepted = 0;
  Decoder d = small.decoder({.capacity = 16});
  for (int i = 0; i < draws; ++i) {
    SequenceOptions o{.sampling = sampling, .id = std::uint64_t(i), .max_new_tokens = 3};
    o.changes.processor = [&](std::span<float> l, std::span<const std::int32_t> ids) {
      if (ids.size() != prompt.size()) return Status();
      std::ranges::fill(l, -std::numeric_limits<float>::infinity());
      l[std::size_t(given)] = 0;
      return Status();
    };
    o.draft = [&](std::span<const std::int32_t>, std::int64_t) -> Result<Ids> { return Ids{proposed.id}; };
    const auto s = taken(d.add(prompt, o));
    taken(d.decode(2));
    const Ids ids = taken(d.ids(s));
    REQUIRE(ids.size() >= 2);
    REQUIRE(ids[0] == given);
    ++counts[ids[1]];
    const DraftCounts c = taken(d.drafts(s));
    REQUIRE(c.drafted >= 1);
    CHECK(c.accepted == (ids[1] == proposed.id));
    accepted += c.accepted;
    REQUIRE(d.drop(s));
  }
  const auto [sum, freedom] = chi_square(kept, counts, draws);
  // Chi-square's deviation is sqrt(2 freedom): five of them.
  CHECK(freedom >= 3);
  CHECK(sum < freedom + 5 * std::sqrt(2 * freedom));
  const double expected = proposed.probability * draws;
  CHECK(std::abs(double(accepted) - expected) < 5 * std::sqrt(expected * (1 - proposed.probability)));
}

TEST_CASE("The logits of a sequence are those that its last id was chosen from, also behind a draft", "[draft]") {
  const Small small;
  const Ids prompt = ids_of(5, 1);
  Decoder plain = small.decoder({.capacity = 64});
  SequenceOptions o{.max_new_tokens = 30};
  const Ids ids = run(plain, prompt, o).ids;
  o.draft = oracle(prompt, ids, 3);
  Decoder d = small.decoder({.capacity = 64});
  const auto s = taken(d.add(prompt, o));
  const auto alone = taken(plain.add(prompt, {.max_new_tokens = 30}));
  int compared = 0;
  for (taken(d.decode()); d.active(); taken(d.decode())) {
    while (taken(plain.ids(alone)).size() < taken(d.ids(s)).size()) taken(plain.decode());
    const Tensor a = taken(d.logits(s)), b = taken(plain.logits(alone));
    REQUIRE(a.size_bytes() == b.size_bytes());
    CHECK(std::memcmp(a.data(), b.data(), std::size_t(a.size_bytes())) == 0);
    ++compared;
  }
  CHECK(compared > 5);
}

TEST_CASE("No draft throws a step away that a model is at work on", "[draft]") {
  const Small small;
  const Ids prompt = ids_of(5, 1);
  Decoder plain = small.decoder({.capacity = 64});
  const Ids ids = run(plain, prompt, {.max_new_tokens = 50}).ids;
  for (std::size_t every : {1, 3, 10}) {
    CAPTURE(every);
    auto owned = std::make_unique<AheadRunner>(small.model({.capacity = 64}));
    const AheadRunner& runner = *owned;
    Decoder d(std::move(owned));
    SequenceOptions o{.max_new_tokens = 50};
    // Drafts behind each id whose place `every` divides, and behind the one after it.
    o.draft = [&](std::span<const std::int32_t> tokens, std::int64_t most) -> Result<Ids> {
      if ((tokens.size() - prompt.size()) % every > 1) return Ids();
      return oracle(prompt, ids, 4)(tokens, most);
    };
    CHECK(run(d, prompt, o).ids == ids);
    CHECK(runner.wasted == 0);
    CHECK(runner.met > 0);
    CHECK(taken(d.drafts(0)).accepted > 0);
  }
}

TEST_CASE("Drafts need a model whose bits do not depend on a step's size", "[bad][draft]") {
  const Small small;
  const Ids prompt = ids_of(5, 1);
  const auto refusal = [&](const Model::Options& model, const SequenceOptions& o) {
    Decoder d = small.decoder(model);
    return d.add(prompt, o).status();
  };
  const SequenceOptions lookup{.max_new_tokens = 9, .draft = lookup_drafter()};
  constexpr auto refused = Code::invalid_argument;
  const auto unfit = {std::string_view(
      "decoder: draft: expected a model that gives a token the same bits in a step of any size, on one "
      "device with `invariant` or on the CPU in float32 with up to 8 slots, got one that does not")};
  CHECK(refusal_fault(refusal({.slots = 9, .capacity = 64}, lookup), refused, unfit) == "");
  CHECK(refusal_fault(refusal({.capacity = 64, .activation = DType::f64}, lookup), refused, unfit) == "");
  CHECK(refusal_fault(refusal({.chunk = 1, .window = 9}, lookup), refused, unfit) == "");
  CHECK(refusal({.slots = 9, .capacity = 64, .invariant = true}, lookup));
  CHECK(refusal({.slots = 9, .capacity = 64}, {.max_new_tokens = 9}));
  SequenceOptions o = lookup;
  for (std::int64_t tokens : {0, -1, 8}) {
    o.draft_tokens = tokens;
    CHECK(refusal_fault(refusal({.capacity = 64}, o), refused,
                        {"decoder: draft_tokens: expected 1 to 7, got " + std::to_string(tokens)}) == "");
  }
}

TEST_CASE("A draft that fails or is outside the vocabulary ends its own sequence", "[bad][draft]") {
  const Small small;
  const Ids prompt = ids_of(5, 1);
  Decoder d = small.decoder({.slots = 3, .capacity = 64});
  SequenceOptions o{.max_new_tokens = 20};
  const auto good = taken(d.add(prompt, o));
  o.draft = [](std::span<const std::int32_t> tokens, std::int64_t) -> Result<Ids> {
    if (tokens.size() == 8) return Status::error(Code::io_error, "a draft's own fault");
    return Ids();
  };
  const auto failed = taken(d.add(prompt, o));
  o.draft = [](std::span<const std::int32_t>, std::int64_t) -> Result<Ids> { return Ids{1, Small::kVocab}; };
  const auto outside = taken(d.add(prompt, o));
  while (d.active()) taken(d.decode());
  CHECK(taken(d.ids(good)).size() == 20);
  CHECK(taken(d.finish(failed)) == Finish::failed);
  CHECK(taken(d.ids(failed)).size() == 3);
  CHECK(refusal_fault(d.status(failed), Code::io_error, {"decoder: sequence 1: a draft's own fault"}) == "");
  CHECK(refusal_fault(d.status(outside), Code::invalid_argument,
                      {"decoder: sequence 2: draft: ids[1]: expected an id of 0 to 28, got 29"}) == "");
  CHECK(taken(d.ids(outside)).size() == 1);
  // Ids beyond what was asked for are left out.
  o.draft = [](std::span<const std::int32_t>, std::int64_t) -> Result<Ids> { return Ids(100, 4); };
  CHECK(run(d, prompt, o).ids == taken(d.ids(good)));
}

TEST_CASE("What fails within a draft is reported as it is without", "[bad][draft]") {
  Small small;
  const Ids prompt = ids_of(5, 1);
  Decoder whole = small.decoder({.capacity = 64});
  const Ids ids = run(whole, prompt, {.sampling = kDrawn, .max_new_tokens = 20}).ids;
  // An id that comes for the first time behind others: its embedding gets a NaN.
  Ids before = prompt;
  std::size_t at = 0;
  while (at < 3 || std::ranges::find(before, ids[at]) != before.end()) {
    before.push_back(ids[at++]);
    REQUIRE(at < 12);
  }
  for (Tensor& t : small.weights->storage)
    if (t.data() == small.weights->weights.embed_in.data)
      t.as<f16>()[ids[at] * small.spec.shape.hidden_size] = f16{0x7e00};
  for (bool by_host : {false, true}) {
    CAPTURE(by_host);
    SequenceOptions o{.sampling = kDrawn, .max_new_tokens = 20};
    if (by_host) o.changes.logit_bias = {{3, 0.0f}};
    const auto fault = [&](const Drafter& draft) {
      o.draft = draft;
      Decoder d = small.decoder({.capacity = 64});
      const Given given = run(d, prompt, o);
      CHECK(given.finish == Finish::failed);
      CHECK(given.ids == Ids(ids.begin(), ids.begin() + std::ptrdiff_t(at) + 1));
      return d.status(0).message();
    };
    const std::string expected = fault({});
    CHECK(expected.find(by_host ? "is NaN" : "is made by gpt_neox.embed_in") != std::string::npos);
    CHECK(fault(oracle(prompt, ids, 0)) == expected);
  }
}
