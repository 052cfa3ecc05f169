// A thousand random schedules on the GPU: sequences that come, share a pass, are read in pieces, fork, wait for pages and
// leave. Each is given what it has alone.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/model/slot_lease.hpp"
#include "tests/cuda/small_model.hpp"
#include "tests/support/schedules.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// Prompts have multiples of eight ids, so that sequences cross pages of 64 entries.
constexpr std::int64_t kScale = 8, kCapacity = kScale * kScheduleCapacity;

/// The models of many schedules. One is made for each kind of cache and each chunk, and serves all its schedules, so
/// that what one leaves behind is there for the next.
class Models {
 public:
  Models(const Small& small, Model::Options options) : small_(small), options_(std::move(options)) {}

  Decoder decoder(const Schedule& s) {
    // Pages for one sequence, for one and a little, for some; or a contiguous cache.
    constexpr std::array<std::int64_t, 4> pools{4, 5, 9, 0};
    constexpr std::array<std::int64_t, 3> chunks{24, 72, 160};
    const bool is_stream = options_.window > 0;
    const std::size_t pool = s.pages == 0 || is_stream ? 3 : std::size_t(s.pages) % 3;
    const std::size_t chunk = std::size_t(s.chunk / kScale) % chunks.size();
    std::shared_ptr<SharedRunner>& shared = shared_[pool][chunk];
    if (!shared) {
      Model::Options o = options_;
      o.slots = kScheduleSlots;
      o.chunk = chunks[chunk];
      o.pages = pools[pool];
      shared = std::make_shared<SharedRunner>(small_.model(o));
    }
    return Decoder(taken(SlotLease::create(shared, s.slots)), s.decoder);
  }
  /// A decoder of one slot, whose prompts are read whole.
  Decoder alone() const {
    Model::Options o = options_;
    o.slots = 1;
    return Decoder(small_.model(o), {.step_tokens = 0});
  }

 private:
  const Small& small_;
  Model::Options options_;
  std::array<std::array<std::shared_ptr<SharedRunner>, 3>, 4> shared_;
};

/// Where steps of other sizes may round otherwise: another id must be as likely as the one that a sequence has alone,
/// within the error that the logits of the two may have.
class NearlyAlone final : public Alone {
 public:
  NearlyAlone(const Small& small, Decoder decoder) : Alone(std::move(decoder)), small_(small) {}
  int near_ties = 0;

 private:
  std::string fault_of_other(const Ids& prompt, const Ids& ids, std::size_t place, std::int32_t expected) override {
    Ids read = prompt;
    read.insert(read.end(), ids.begin(), ids.begin() + std::ptrdiff_t(place));
    const Reference r = reference_of(small_, read);
    const std::span logits(r.logits.as<double>(), std::size_t(r.logits.size())), last = logits.last(kVocab);
    double largest = 0;
    for (double x : logits) largest = std::max(largest, std::abs(x));
    const double apart = std::abs(last[std::size_t(ids[place])] - last[std::size_t(expected)]);
    if (apart > 2 * r.budget.rel_max * largest) return Alone::fault_of_other(prompt, ids, place, expected);
    ++near_ties;
    return "";
  }
  const Small& small_;
};

SequenceOptions greedy(std::uint64_t id, std::int64_t tokens) { return {.id = id, .max_new_tokens = tokens}; }

/// One in three is greedy, one is sampled, and one is sampled and has its log-probabilities.
SequenceOptions mixed(std::uint64_t id, std::int64_t tokens) {
  SequenceOptions o = id == 0 ? greedy(id, tokens) : sampled(id, tokens);
  if (id == 2) o.logprobs = 2;
  return o;
}

ModelConfig windowed() {
  ModelConfig m = gated_config(ModelType::mistral);
  m.num_hidden_layers = 1;
  m.sliding_window = 48;
  return m;
}

}  // namespace

TEST_CASE("schedules on the GPU: the ids and the bits that each sequence has alone, by an invariant model",
          "[gpu][schedules]") {
  const bool gated = GENERATE(false, true);
  CAPTURE(gated);
  const Small small(DType::f16, {}, gated ? windowed() : small_config(1));
  Models models(small, {.capacity = kCapacity, .impl = Impl::graph, .invariant = true});
  Alone alone(models.alone());
  const Counts counts = check_schedules(
      gated ? 0 : 1000, 150, kScale, [&](const Schedule& s) { return models.decoder(s); }, ids_of, mixed, alone);
  CHECK(counts.forks > 50);
  CHECK(counts.given_up > 10);
}

TEST_CASE(
    "schedules on the GPU: with drafts the ids and the bits that each sequence has alone without, by an invariant "
    "model",
    "[gpu][schedules][draft]") {
  const bool gated = GENERATE(false, true);
  CAPTURE(gated);
  const Small small(DType::f16, {}, gated ? windowed() : small_config(1));
  Models models(small, {.capacity = kCapacity, .impl = Impl::graph, .invariant = true});
  Alone alone(models.alone());
  std::int64_t drafted = 0;
  const Counts counts = check_schedules(
      gated ? 6000 : 7000, 100, kScale, [&](const Schedule& s) { return models.decoder(s); }, ids_of,
      // Drafts of the prompt's ids, few of which are right, and none in every fourth step.
      [&](std::uint64_t id, std::int64_t tokens) {
        SequenceOptions o = mixed(id, tokens);
        o.draft = [&](std::span<const std::int32_t> so_far, std::int64_t most) -> Result<Ids> {
          if (so_far.size() % 4 == 0) return Ids();
          const auto n = std::min(std::size_t(most), so_far.size());
          drafted += std::int64_t(n);
          return Ids(so_far.end() - std::ptrdiff_t(n), so_far.end());
        };
        o.draft_adapts = false;
        return o;
      },
      alone);
  CHECK(drafted > 1000);
  CHECK(counts.given_up > 5);
}

TEST_CASE("schedules on the GPU: the ids that each sequence has alone, in float32", "[gpu][schedules]") {
  const Small small(DType::f32, {}, small_config(1));
  Models models(small, {.capacity = kCapacity, .impl = Impl::graph});
  Alone alone(models.alone());
  const Counts counts = check_schedules(
      2000, 300, kScale, [&](const Schedule& s) { return models.decoder(s); }, ids_of, sampled, alone);
  CHECK(counts.forks > 100);
  CHECK(counts.given_up > 20);
}

TEST_CASE("schedules on the GPU: the ids that each sequence has alone, but for near ties", "[gpu][schedules]") {
  const bool gated = GENERATE(false, true);
  CAPTURE(gated);
  const Small small(DType::f16, {}, gated ? windowed() : small_config(1));
  Models models(small, {.capacity = kCapacity, .impl = Impl::graph});
  NearlyAlone alone(small, models.alone());
  const Counts counts = check_schedules(
      gated ? 3000 : 4000, 100, kScale, [&](const Schedule& s) { return models.decoder(s); }, ids_of, greedy, alone);
  CHECK(counts.forks > 30);
  CHECK(alone.near_ties < 40);
}

TEST_CASE("GPU drafts are refused by name where bits depend on a step's size", "[gpu][bad][draft]") {
  const Small small(DType::f16, {}, small_config(1));
  const auto refusal = [&](Model::Options o) {
    o.impl = Impl::graph;
    Decoder d = small.decoder(o);
    return d.add(ids_of(8, 1), {.max_new_tokens = 4, .draft = lookup_drafter()}).status();
  };
  for (const Model::Options& o : {Model::Options{.capacity = 96}, Model::Options{.invariant = true, .window = 60}}) {
    INFO(refusal(o).message());
    CHECK(refusal(o).message().find("decoder: draft: expected a model that gives a token the same bits") == 0);
  }
  CHECK(refusal({.capacity = 96, .invariant = true}));
}

TEST_CASE("schedules on the GPU: the ids and the bits that each stream has alone", "[gpu][schedules]") {
  const Small small(DType::f16, {}, small_config(1));
  Models models(small, {.impl = Impl::graph, .invariant = true, .window = 60, .sinks = 4});
  Alone alone(models.alone());
  check_schedules(
      5000, 200, kScale, [&](const Schedule& s) { return models.decoder(s); }, ids_of, mixed, alone);
}
