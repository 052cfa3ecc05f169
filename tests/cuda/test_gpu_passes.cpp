// Passes on the GPU: prompts of any lengths and running tokens that share them, beside each sequence alone.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/model/slot_lease.hpp"
#include "tests/cuda/small_model.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// The step of whole prompts, one in each slot from 0 on.
struct Prompts {
  std::vector<Ids> all;
  std::vector<Run> runs{};
  Ids ids{};

  explicit Prompts(std::vector<Ids> prompts) : all(std::move(prompts)) {
    for (const Ids& p : all) {
      runs.push_back({.sequence = std::int64_t(runs.size()), .count = std::int64_t(p.size())});
      ids.insert(ids.end(), p.begin(), p.end());
    }
  }
};

/// Prompts of 1 to `most` ids.
Prompts random_prompts(std::int64_t count, std::uint32_t most, std::uint64_t seed) {
  std::mt19937 random{std::uint32_t(seed)};
  std::vector<Ids> all;
  for (std::int64_t i = 0; i < count; ++i)
    all.push_back(ids_of(1 + std::int64_t(random() % most), seed * 1000 + std::uint64_t(i)));
  return Prompts(std::move(all));
}

/// Sequence i, which is sampled or not. Where products of other sizes round otherwise, a sampled id may be another one;
/// with `invariant` they do not.
SequenceOptions options_of(std::size_t i, std::int64_t tokens, bool sampled = false) {
  SequenceOptions o{.id = i, .max_new_tokens = tokens};
  if (sampled) o.sampling = {.temperature = 1, .seed = 9};
  return o;
}

/// The ids of each sequence by itself.
class Alone {
 public:
  Alone(const Small& small, const Model::Options& o)
      : small_(small), decoder_(small.model(o), {.step_tokens = 0}), sampled_(o.invariant) {}

  /// Expects a sequence's ids, or the first of them. With `invariant` they are those that it has alone. Without, the
  /// first that is not must be as likely as the other one, within the error that the two together may have.
  void check(const Ids& ids, const Ids& prompt, std::size_t i, std::int64_t tokens) {
    const Ids& expected = (*this)(prompt, i, tokens);
    REQUIRE(ids.size() <= expected.size());
    const auto [ours, theirs] = std::mismatch(ids.begin(), ids.end(), expected.begin());
    if (ours == ids.end()) return;
    CAPTURE(i, prompt.size(), ids, expected);
    REQUIRE(!sampled_);
    Ids read = prompt;
    read.insert(read.end(), ids.begin(), ours);
    const Reference r = reference_of(small_, read);
    const std::span logits(r.logits.as<double>(), std::size_t(r.logits.size())), last = logits.last(kVocab);
    double largest = 0;
    for (double x : logits) largest = std::max(largest, std::abs(x));
    const double allowed = r.budget.rel_max * largest;
    CHECK(std::abs(last[std::size_t(*ours)] - last[std::size_t(*theirs)]) <= 2 * allowed);
    ++near_ties;
  }
  int near_ties = 0;

  const Ids& operator()(const Ids& prompt, std::size_t i, std::int64_t tokens) {
    const auto [found, is_new] = known_.try_emplace({prompt, i, tokens});
    if (is_new) {
      const auto s = taken(decoder_.add(prompt, options_of(i, tokens, sampled_ && i % 2)));
      while (decoder_.active()) taken(decoder_.decode());
      found->second = taken(decoder_.ids(s));
      require_ok(decoder_.drop(s));
    }
    return found->second;
  }

 private:
  const Small& small_;
  Decoder decoder_;
  bool sampled_;  // every second sequence
  std::map<std::tuple<Ids, std::size_t, std::int64_t>, Ids> known_;
};

Tensor rows_of(const Tensor& all, std::int64_t first, std::int64_t count) {
  Tensor part(all.dtype(), {count, kVocab});
  const auto bytes = kVocab * std::int64_t(size_bytes(all.dtype()));
  std::memcpy(part.data(), static_cast<const char*>(all.data()) + first * bytes, std::size_t(count * bytes));
  return part;
}

}  // namespace

TEST_CASE("passes on the GPU: 1 to 300 prompts in one call are given the ids that each has alone", "[gpu][passes]") {
  const auto [impl, count, chunk, invariant] =
      GENERATE(table<Impl, std::int64_t, std::int64_t, bool>({{Impl::graph, 2, 64, false},
                                                              {Impl::graph, 7, 2048, false},
                                                              {Impl::graph, 64, 512, false},
                                                              {Impl::graph, 300, 2048, false},
                                                              {Impl::unfused, 7, 256, false},
                                                              {Impl::persistent, 7, 512, false},
                                                              {Impl::layer, 2, 2048, false},
                                                              {Impl::graph, 40, 512, true},
                                                              {Impl::unfused, 7, 256, true}}));
  const bool gated = GENERATE(false, true);
  if (gated && (impl == Impl::layer || count == 300)) return;
  CAPTURE(to_string(impl), count, chunk, invariant, gated);
  const Small small(DType::f16, {}, gated ? gated_config() : small_config());
  const Model::Options options{.slots = count, .capacity = 320, .chunk = chunk, .impl = impl, .invariant = invariant};
  constexpr std::int64_t kTokens = 6;
  const Prompts prompts = random_prompts(count, 300, std::uint64_t(count));
  Alone alone(small, options);
  Decoder d = small.decoder(options);
  for (int run = 0; run < 2; ++run) {
    std::vector<Decoder::Sequence> sequences;
    for (std::size_t i = 0; i < prompts.all.size(); ++i)
      sequences.push_back(taken(d.add(prompts.all[i], options_of(i, kTokens, invariant && i % 2))));
    CHECK(taken(d.prefill()).size() == sequences.size());
    while (d.active()) taken(d.decode());
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      CAPTURE(run, i, prompts.all[i].size());
      alone.check(taken(d.ids(sequences[i])), prompts.all[i], i, kTokens);
      require_ok(d.drop(sequences[i]));
    }
  }
  CHECK(alone.near_ties <= 1 + 2 * count / 50);
}

TEST_CASE(
    "passes on the GPU: the logits of prompts in one call are the oracle's within the budget, twice the same bits",
    "[gpu][passes]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const std::int64_t chunk = GENERATE(16, 100, 2048);
  const bool gated = GENERATE(false, true);
  CAPTURE(to_string(dtype), chunk, gated);
  const Small small(dtype, {}, gated ? gated_config() : small_config());
  const Prompts prompts(
      {ids_of(1, 1), ids_of(63, 2), ids_of(64, 3), ids_of(65, 4), ids_of(2, 5), ids_of(16, 6), ids_of(17, 7)});
  const Model::Options options{.slots = 8, .capacity = 96, .chunk = chunk};
  std::string first;
  for (int run = 0; run < 2; ++run) {
    const auto model = small.model(options);
    require_ok(model->run(prompts.runs, prompts.ids, {}));
    std::string all;
    for (std::size_t i = 0; i < prompts.all.size(); ++i) {
      CAPTURE(i);
      const Tensor row = row_of(*model, std::int64_t(i));
      all += bits(row);
      if (run > 0) continue;
      check_rows(row, reference_of(small, prompts.all[i]), std::int64_t(prompts.all[i].size()) - 1);
    }
    CHECK(model->length(7) == 0);
    if (run == 0) first = all;
    CHECK(all == first);
  }
}

TEST_CASE("passes on the GPU: a caller has the rows of logits that it asks for, with the slots' own or without",
          "[gpu][passes]") {
  const std::int64_t chunk = GENERATE(20, 2048);
  const bool own = GENERATE(false, true);
  CAPTURE(chunk, own);
  const Small small;
  const auto model = small.model({.slots = 4, .capacity = 96, .chunk = chunk});
  const Ids begin = ids_of(10, 8);
  Ids with_one = begin;
  with_one.push_back(3);
  // Slots 1 and 2 have entries; slot 2's own logits are those of a step.
  require_ok(model->prefill(1, 0, begin));
  require_ok(model->prefill(2, 0, begin));
  require_ok(model->step(std::vector<ModelRunner::Token>{{2, 3, 10}}));
  const std::string before = bits(row_of(*model, 2));

  std::vector<Ids> read{ids_of(30, 1), begin, with_one};
  const Ids more = ids_of(24, 2), last = ids_of(1, 3);
  const std::vector<Run> runs{{0, 0, 30}, {2, 11, 1}, {1, 10, 24}};
  Ids ids = read[0];
  ids.insert(ids.end(), last.begin(), last.end());
  ids.insert(ids.end(), more.begin(), more.end());
  read[1].insert(read[1].end(), more.begin(), more.end());
  read[2].push_back(last[0]);
  const std::vector<std::int64_t> wanted{30, 1, 3};
  Tensor rows(model->activation(), {34, kVocab});
  require_ok(model->run(runs, ids, {.own = own, .rows = wanted, .to = rows.view<2>()}));
  check_rows(rows_of(rows, 0, 30), reference_of(small, read[0]), 0);
  check_rows(rows_of(rows, 30, 1), reference_of(small, read[2]), 11);
  check_rows(rows_of(rows, 31, 3), reference_of(small, read[1]), 31);
  for (std::int64_t slot = 0; slot < 3; ++slot)
    CHECK(model->length(slot) == std::int64_t(read[std::size_t(slot)].size()));
  if (own) {
    CHECK(bits(row_of(*model, 0)) == bits(rows_of(rows, 29, 1)));
    CHECK(bits(row_of(*model, 2)) == bits(rows_of(rows, 30, 1)));
    CHECK(bits(row_of(*model, 1)) == bits(rows_of(rows, 33, 1)));
  } else {
    CHECK(bits(row_of(*model, 2)) == before);
  }
}

TEST_CASE("passes on the GPU: running sequences get an id in each step while a prompt joins them in pieces",
          "[gpu][passes]") {
  const Impl impl = GENERATE(Impl::graph, Impl::persistent);
  CAPTURE(to_string(impl));
  const Small small;
  const Model::Options options{.slots = 4, .capacity = 320, .chunk = 64, .impl = impl};
  const auto model = small.model(options);
  CHECK(model->pass_tokens() == 64);
  CHECK(model->preferred_step_tokens() == 64);
  CHECK(small.model({.slots = 4, .capacity = 4096})->preferred_step_tokens() == 256);
  CHECK(small.model({.slots = 128, .capacity = 4096})->preferred_step_tokens() == 256);
  CHECK(small.model({.slots = 129, .capacity = 4096})->preferred_step_tokens() == 384);
  CHECK(small.model({.slots = 1, .capacity = 4096})->preferred_step_tokens() == 0);
  Alone alone(small, options);
  Decoder d = small.decoder(options);
  const std::vector<Ids> prompts{ids_of(5, 1), ids_of(40, 2), ids_of(1, 3), ids_of(300, 4)};
  for (std::size_t i = 0; i < 3; ++i) taken(d.add(prompts[i], options_of(i, 12)));
  CHECK(taken(d.prefill()).size() == 3);
  CHECK(taken(d.decode()).size() == 3);
  taken(d.add(prompts[3], options_of(3, 12)));
  // The step that runs ahead, and then 61 of its ids beside three running tokens: four steps, and one with the last 56,
  // which has its first id too.
  for (int step = 0; step < 5; ++step) CHECK(taken(d.decode()).size() == 3);
  CHECK(taken(d.decode()).size() == 4);
  while (d.active()) taken(d.decode());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    CAPTURE(i);
    CHECK(taken(d.ids(std::int64_t(i))).size() == 12);
    alone.check(taken(d.ids(std::int64_t(i))), prompts[i], i, 12);
  }
}

TEST_CASE("passes on the GPU: in random schedules every sequence gets the ids that it has alone", "[gpu][passes]") {
  const auto [impl, invariant] = GENERATE(table<Impl, bool>(
      {{Impl::unfused, false}, {Impl::graph, false}, {Impl::persistent, false}, {Impl::graph, true}}));
  const Small small;
  const Model::Options options{.slots = 5, .capacity = 96, .chunk = 48, .impl = impl, .invariant = invariant};
  Alone alone(small, options);
  const auto shared = std::make_shared<SharedRunner>(small.model(options));
  std::mt19937 random(7);
  const auto below = [&](std::uint32_t n) { return std::uint32_t(random() % n); };
  int stopped = 0, joined = 0;
  for (int round = 0; round < 40; ++round) {
    DecoderOptions o;
    if (below(3)) o.step_tokens = below(4) ? 1 + below(60) : 0;
    CAPTURE(to_string(impl), invariant, round, o.step_tokens.value_or(-1));
    Decoder d(taken(SlotLease::create(shared, options.slots)), o);
    struct Sequence {
      Ids prompt;
      std::size_t i;
      std::int64_t tokens;
    };
    std::map<Decoder::Sequence, Sequence> living;
    const auto check = [&](Decoder::Sequence s) {
      const Sequence& l = living.at(s);
      const Ids ids = taken(d.ids(s));
      alone.check(ids, l.prompt, l.i, l.tokens);
      if (taken(d.finish(s)) == Finish::length) CHECK(std::int64_t(ids.size()) == l.tokens);
    };
    for (int n = 0; n < 24; ++n) {
      const std::uint32_t what = below(10);
      if (what < 4) {
        const Sequence l{ids_of(1 + below(70), below(6)), below(4), 1 + below(20)};
        joined += d.active();
        living[taken(d.add(l.prompt, options_of(l.i, l.tokens, invariant && l.i % 2)))] = l;
      } else if (what < 8) {
        taken(d.decode(1 + below(8)));
      } else if (what < 9) {
        taken(d.prefill());
      } else if (!living.empty()) {
        const auto of = std::next(living.begin(), below(std::uint32_t(living.size())));
        check(of->first);
        stopped += taken(d.finish(of->first)) == Finish::running;
        require_ok(d.drop(of->first));
        living.erase(of);
      }
    }
    while (d.active()) taken(d.decode(1 + below(5)));
    for (const auto& [s, l] : living) check(s);
  }
  CHECK(alone.near_ties < 20);
  CHECK(stopped > 20);
  CHECK(joined > 100);
}

TEST_CASE("passes on the GPU: a thousand sequences in 1,024 slots, twice the same bits", "[gpu][passes]") {
  const bool gated = GENERATE(false, true);
  CAPTURE(gated);
  const Small small(DType::f16, {}, gated ? gated_config() : small_config(1));
  constexpr std::int64_t kSlots = 1024, kTokens = 5;
  const Model::Options options{.slots = kSlots, .capacity = 24};
  // 24 prompts, each in many slots.
  const auto prompt = [](std::int64_t i) { return ids_of(1 + i % 24 % 12, std::uint64_t(i % 24)); };
  Alone alone(small, options);
  std::string first;
  for (int run = 0; run < 2; ++run) {
    Decoder d = small.decoder(options);
    for (std::int64_t i = 0; i < kSlots; ++i) taken(d.add(prompt(i), options_of(std::size_t(i % 24), kTokens)));
    CHECK(d.free_slots() == 0);
    CHECK(taken(d.prefill()).size() == kSlots);
    for (std::int64_t token = 1; token < kTokens; ++token) {
      if (token + 1 == kTokens) {
        std::string all;
        for (std::int64_t i : {0, 1, 500, 1023}) all += bits(taken(d.logits(i)));
        if (run == 0) first = all;
        CHECK(all == first);
      }
      CHECK(taken(d.decode()).size() == kSlots);
    }
    CHECK(!d.active());
    for (std::int64_t i = 0; i < kSlots; ++i)
      if (taken(d.ids(i)) != alone(prompt(i), std::size_t(i % 24), kTokens)) FAIL_CHECK("sequence " << i);
  }
}

TEST_CASE("passes on the GPU: between two passes a call can be ended, and the slots serve again",
          "[gpu][passes][small][library]") {
  const Small small;
  const auto model = small.model({.slots = 4, .capacity = 96, .chunk = 32});
  const Prompts prompts({ids_of(30, 1), ids_of(30, 2), ids_of(30, 3), ids_of(2, 4)});
  int asked = 0;
  model->check_between([&] { return ++asked == 2 ? Status::error(Code::io_error, "enough") : Status(); });
  CHECK(refusal_fault(model->run(prompts.runs, prompts.ids, {}), Code::io_error, {"enough"}) == "");
  CHECK(asked == 2);
  CHECK(model->length(0) == 30);
  CHECK(model->length(1) == 0);
  model->check_between({});
  require_ok(model->run(prompts.runs, prompts.ids, {}));
  for (std::size_t i = 0; i < prompts.all.size(); ++i) {
    CAPTURE(i);
    check_rows(row_of(*model, std::int64_t(i)), reference_of(small, prompts.all[i]),
               std::int64_t(prompts.all[i].size()) - 1);
  }
  // A visitor sees the same passes: 30 tokens, 30, and 30 with the last prompt's 2.
  int embeddings = 0;
  model->watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor>) {
    embeddings += site.name() == "gpt_neox.embed_in";
    return Status();
  });
  require_ok(model->run(prompts.runs, prompts.ids, {}));
  CHECK(embeddings == 3);
}

TEST_CASE("passes on the GPU: of 300 slots the first ones step by themselves, and slots behind them join and leave",
          "[gpu][passes]") {
  const Impl impl = GENERATE(Impl::graph, Impl::unfused);
  CAPTURE(to_string(impl));
  const Small small;
  const auto model = small.model({.slots = 300, .capacity = 64, .impl = impl});
  std::map<std::int64_t, Ids> sequences;
  const auto step = [&] {
    std::vector<ModelRunner::Token> tokens;
    for (auto& [slot, ids] : sequences) {
      tokens.push_back({slot, std::int32_t((slot + std::int64_t(ids.size())) % kVocab), std::int64_t(ids.size())});
      ids.push_back(tokens.back().id);
    }
    require_ok(model->step(tokens));
    std::vector<ModelRunner::Draw> draws;
    for (const auto& [slot, ids] : sequences)
      draws.push_back(
          {.slot = slot, .sampling = {}, .sequence = 0, .position = std::int64_t(ids.size()), .history = {}});
    for (const auto& id : model->choose(draws)) taken(id);
  };
  const auto check = [&] {
    for (const auto& [slot, ids] : sequences) {
      CAPTURE(slot, ids.size());
      check_rows(row_of(*model, slot), reference_of(small, ids), std::int64_t(ids.size()) - 1);
    }
  };
  // The last slot of 256 and of all.
  for (std::int64_t slot : {3, 127, 255, 256, 299}) {
    sequences[slot] = ids_of(4 + slot % 5, std::uint64_t(slot));
    require_ok(model->prefill(slot, 0, sequences[slot]));
    step();
    step();
    check();
  }
  while (sequences.size() > 1) {
    const std::int64_t last = sequences.rbegin()->first;
    model->release(last);
    sequences.erase(last);
    step();
    check();
  }
}
