// What a decoder chooses on the host, and the log-probabilities of what was chosen.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/host_sampler.hpp"
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
using Ids = std::vector<std::int32_t>;
constexpr std::int64_t kVocab = 61;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Decoder decoder(std::int64_t slots, DType activation = DType::f32) {
  ModelConfig m;
  m.name = "small";
  m.hidden_size = 48;
  m.num_hidden_layers = 2;
  m.num_attention_heads = 3;
  m.intermediate_size = 100;
  m.vocab_size = kVocab;
  m.max_position_embeddings = 64;
  m.rotary_dim = 8;
  const auto weights = std::make_shared<OwnedModelWeights>(procedural_model(m, DType::f16, 7, {}));
  const cpu_ref::Model::Options options{.slots = slots, .capacity = 64, .chunk = 8, .activation = activation};
  return Decoder(taken(cpu_ref::Model::create(m, weights->weights, weights, options)));
}

const Ids kPrompt{5, 17, 3, 5};
const Sampling kDrawn{.temperature = 1.5, .top_k = 30, .top_p = 0.95, .repetition_penalty = 1.3, .seed = 5};

LogitsChanges processed(LogitsChanges::Processor processor) {
  LogitsChanges changes;
  changes.processor = std::move(processor);
  return changes;
}

/// The ids that a sequence is given beside others, which have the ids that they get alone.
Ids ids_of(Decoder& d, const SequenceOptions& options) {
  const auto s = taken(d.add(kPrompt, options));
  while (taken(d.finish(s)) == Finish::running) taken(d.decode());
  const Ids ids = taken(d.ids(s));
  REQUIRE(d.drop(s));
  return ids;
}

}  // namespace

TEST_CASE("Changes that change nothing leave the ids as the runner chooses them, and those of the neighbours",
          "[choice]") {
  const DType activation = GENERATE(DType::f32, DType::f64);
  const Sampling sampling = GENERATE(Sampling{}, Sampling{.repetition_penalty = 1.3}, kDrawn);
  SequenceOptions own{.sampling = sampling, .id = 3, .max_new_tokens = 20};
  Decoder d = decoder(3, activation);
  const Ids expected = ids_of(d, own);
  SequenceOptions neighbour{.sampling = kDrawn, .id = 9, .max_new_tokens = 20};
  const Ids neighbours = ids_of(d, neighbour);

  std::vector<LogitsChanges> nothing(4);
  nothing[0].logit_bias = {{7, 0.0f}};
  nothing[1].min_new_tokens = 5;  // there are no stop ids
  nothing[2] = processed([](std::span<float>, std::span<const std::int32_t>) { return Status(); });
  nothing[3] = processed([&](std::span<float> logits, std::span<const std::int32_t> ids) {
    CHECK(logits.size() == std::size_t(kVocab));
    CHECK(Ids(ids.begin(), ids.begin() + 4) == kPrompt);
    const Ids made(ids.begin() + 4, ids.end());
    CHECK(made == Ids(expected.begin(), expected.begin() + std::ptrdiff_t(made.size())));
    return Status();
  });
  for (const LogitsChanges& changes : nothing) {
    CHECK_FALSE(changes.none());
    own.changes = changes;
    CHECK(ids_of(d, own) == expected);
    const auto beside = taken(d.add(kPrompt, neighbour));
    CHECK(ids_of(d, own) == expected);
    CHECK(taken(d.ids(beside)) == neighbours);
    REQUIRE(d.drop(beside));
  }
}

TEST_CASE("Logits are changed in the order that LogitsChanges says", "[choice]") {
  Decoder d = decoder(2);
  LogitsChanges changes;
  changes.logit_bias = {{2, 1.5f}, {40, -kInfinity}, {5, 4.0f}};
  changes.frequency_penalty = 0.7;
  changes.presence_penalty = -0.3;
  changes.min_new_tokens = 6;
  const SequenceOptions options{
      .sampling = kDrawn, .id = 3, .stop = {2, 11}, .max_new_tokens = 30, .changes = changes, .logprobs = 0};
  const auto s = taken(d.add(kPrompt, options));
  Ids tokens = kPrompt;
  while (taken(d.finish(s)) == Finish::running) {
    taken(d.decode());
    if (taken(d.finish(s)) != Finish::running) break;
    const Tensor logits = taken(d.logits(s));
    std::vector<float> row(logits.as<float>(), logits.as<float>() + kVocab);
    row[2] += 1.5f;
    row[5] += 4.0f;
    row[40] = -kInfinity;
    for (std::int32_t id = 0; id < kVocab; ++id) {
      float& l = row[std::size_t(id)];
      if (std::find(tokens.begin(), tokens.end(), id) != tokens.end()) l = l < 0 ? l * 1.3f : l / 1.3f;
      if (const auto count = std::count(tokens.begin() + 4, tokens.end(), id)) l = float(l - 0.7 * double(count) + 0.3);
    }
    if (tokens.size() < 4 + 6) row[2] = row[11] = -kInfinity;
    Sampling rest = kDrawn;
    rest.repetition_penalty = 1;
    const auto id = taken(sample(std::span<const float>(row), rest, {}, 3, std::int64_t(tokens.size())));
    tokens.push_back(id);
    REQUIRE(taken(d.ids(s)) == Ids(tokens.begin() + 4, tokens.end()));
  }
  CHECK(taken(d.ids(s)).size() > 6);
}

TEST_CASE("A bias and min_new_tokens do what they are for", "[choice]") {
  Decoder d = decoder(1);
  SequenceOptions options{.max_new_tokens = 12};
  const Ids greedy = ids_of(d, options);
  options.stop = {greedy[2]};
  CHECK(ids_of(d, options).size() <= 3);
  options.changes.min_new_tokens = 8;
  const Ids longer = ids_of(d, options);
  CHECK(longer.size() >= 8);
  CHECK(std::find(longer.begin(), longer.begin() + 8, greedy[2]) == longer.begin() + 8);
  options.changes = {};
  options.stop = {};
  options.changes.logit_bias = {{33, 100.0f}};
  CHECK(ids_of(d, options) == Ids(12, 33));
}

TEST_CASE("Log-probabilities are those of the raw logits", "[choice]") {
  const DType activation = GENERATE(DType::f32, DType::f64);
  Decoder d = decoder(2, activation);
  SequenceOptions options{.sampling = kDrawn, .id = 3, .max_new_tokens = 12};
  const Ids expected = ids_of(d, options);
  options.logprobs = 5;
  const bool biased = GENERATE(false, true);
  if (biased) options.changes.logit_bias = {{33, 3.0f}};
  const auto s = taken(d.add(kPrompt, options)), without = taken(d.add(kPrompt, {.max_new_tokens = 12}));
  for (std::int64_t n = 1; n < 12; ++n) {
    taken(d.decode());
    const Tensor row = taken(d.logits(s));
    const std::int32_t id = taken(d.ids(s)).back();
    double sum = 0;
    for (std::int64_t i = 0; i < kVocab; ++i) sum += std::exp(row.at(i));
    const TokenLogprobs found = taken(d.logprobs(s, n - 1)).at(0);
    CHECK(std::abs(found.logprob - (row.at(id) - std::log(sum))) < 1e-12);
    REQUIRE(found.top.size() == 5);
    for (std::size_t i = 0; i < 5; ++i) {
      const auto& [other, logprob] = found.top[i];
      CHECK(std::abs(logprob - (row.at(other) - std::log(sum))) < 1e-12);
      std::int64_t above = 0;
      for (std::int64_t j = 0; j < kVocab; ++j) above += row.at(j) > row.at(other);
      CHECK(above == std::int64_t(i));
    }
  }
  taken(d.decode());
  // The last id's too, though the sequence has ended.
  CHECK(taken(d.finish(s)) == Finish::length);
  CHECK(taken(d.logprobs(s)).size() == 12);
  CHECK(taken(d.logprobs(s, 12)).empty());
  CHECK(taken(d.logprobs(without)).empty());
  if (!biased) CHECK(taken(d.ids(s)) == expected);
}

TEST_CASE("What cannot be chosen fails its own sequence, and what has no meaning is refused", "[choice]") {
  Decoder d = decoder(2);
  const auto fails = [](const char* what) {
    return processed(
        [=](std::span<float>, std::span<const std::int32_t>) { return Status::error(Code::invalid_argument, what); });
  };
  const auto none = processed([](std::span<float> logits, std::span<const std::int32_t>) {
    std::fill(logits.begin(), logits.end(), -kInfinity);
    return Status();
  });
  const auto good = taken(d.add(kPrompt, {.max_new_tokens = 3}));
  for (const auto& [changes, said] : {std::pair(fails("no row"), "no row"), std::pair(none, "every score is -inf")}) {
    const auto bad = taken(d.add(kPrompt, {.changes = changes, .logprobs = 2}));
    taken(d.decode());
    CHECK(taken(d.finish(bad)) == Finish::failed);
    CHECK(d.status(bad).message().find(said) != std::string::npos);
    CHECK(taken(d.logprobs(bad)).empty());
  }
  taken(d.decode());
  CHECK(taken(d.finish(good)) == Finish::length);

  const auto fault = [&](const SequenceOptions& options, std::string_view text) {
    return refusal_fault(d.add(kPrompt, options).status(), Code::invalid_argument, {text});
  };
  LogitsChanges c;
  const auto changed = [&](auto&& change) {
    LogitsChanges changes;
    change(changes);
    return SequenceOptions{.max_new_tokens = 4, .changes = changes};
  };
  CHECK(fault(changed([](auto& x) {
                x.logit_bias = {{61, 1.0f}};
              }),
              "logit_bias[0]: expected an id of 0 to 60, got 61") == "");
  CHECK(fault(changed([](auto& x) { x.logit_bias = {{1, 1.0f}, {1, 2.0f}}; }), "got two for id 1") == "");
  CHECK(fault(changed([](auto& x) { x.logit_bias = {{1, kInfinity}}; }), "below infinity for id 1") == "");
  CHECK(fault(changed([](auto& x) { x.logit_bias = {{1, std::nanf("")}}; }), "below infinity for id 1") == "");
  CHECK(fault(changed([](auto& x) { x.frequency_penalty = 2.5; }), "frequency_penalty: expected -2 to 2") == "");
  CHECK(fault(changed([](auto& x) { x.presence_penalty = std::nan(""); }), "presence_penalty: expected -2") == "");
  CHECK(fault(changed([](auto& x) { x.min_new_tokens = -1; }), "min_new_tokens: expected at least 0") == "");
  CHECK(fault(changed([](auto& x) { x.min_new_tokens = 5; }), "expected at most max_new_tokens, 4, got 5") == "");
  CHECK(fault({.logprobs = 62}, "logprobs: expected 0 to 61 alternatives, got 62") == "");
  CHECK(fault({.logprobs = -1}, "logprobs: expected 0 to 61 alternatives, got -1") == "");
  CHECK(refusal_fault(d.logprobs(good, 4).status(), Code::invalid_argument, {"first: expected 0 to 3"}) == "");
}
