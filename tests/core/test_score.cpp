// Log-probabilities of given ids: of a row of logits, and of prompts on a runner whose logits are a function of ids.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/log_probs.hpp"
#include "core/model/config.hpp"
#include "core/model/score.hpp"
#include "core/model/slot_lengths.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kVocab = 19;
constexpr std::int32_t kNanId = 7;  // the logits behind this id have a NaN

std::string message_of(const Status& s) { return s.message(); }
std::string fault_of(const Status& s, std::string_view text) {
  return refusal_fault(s, Code::invalid_argument, {text});
}

/// The logits behind some ids.
std::vector<double> logits_behind(std::span<const std::int32_t> ids) {
  std::uint64_t hash = 1;
  for (std::int32_t id : ids) hash = hash * 6364136223846793005u + std::uint64_t(id) + 1442695040888963407u;
  std::mt19937_64 random(hash);
  std::vector<double> logits;
  for (std::int64_t i = 0; i < kVocab; ++i) logits.push_back(double(random() % 4096) / 256 - 8);
  if (ids.back() == kNanId) logits[3] = std::numeric_limits<double>::quiet_NaN();
  return logits;
}

/// A model whose logits are logits_behind() the ids that a slot holds.
class Toy final : public ModelRunner {
 public:
  Toy(std::int64_t slots, std::int64_t capacity, DType dtype)
      : capacity_(capacity),
        dtype_(dtype),
        spec_(spec_of()),
        lengths_(slots, spec_, capacity),
        held_(std::size_t(slots)) {}

  const ModelSpec& model() const override { return spec_; }
  std::int64_t slots() const override { return lengths_.slots(); }
  std::int64_t capacity() const override { return capacity_; }
  DType activation() const override { return dtype_; }
  std::int64_t length(std::int64_t slot) const override { return lengths_[slot]; }
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override {
    if (fails) return Status::error(Code::device_error, "lost");
    CF_TRY(check_step(*this, lengths_, runs, ids, logits));
    if (logits.own) return Status::error(Code::invalid_argument, "expected no logits of the slots' own");
    most_rows = std::max(most_rows, logits.to.shape[0]);
    most_runs = std::max(most_runs, runs.size());
    for (const StepPart& part : parts_of(runs, ids, logits)) {
      Ids& held = held_[std::size_t(part.run.sequence)];
      held.resize(std::size_t(part.run.first_position));
      auto* row = static_cast<std::byte*>(part.rows.data);
      for (std::size_t i = 0; i < part.ids.size(); ++i) {
        held.push_back(part.ids[i]);
        if (std::int64_t(i) < part.run.count - part.rows.shape[0]) continue;
        convert(logits_behind(held).data(), DType::f64, row, dtype_, kVocab);
        row += std::size_t(kVocab) * size_bytes(dtype_);
      }
      lengths_.set(part.run.sequence, std::int64_t(held.size()));
      ids_read += part.run.count;
    }
    return {};
  }
  std::vector<Result<std::int32_t>> choose(std::span<const Draw>) override { return {}; }
  Result<Tensor> logits(std::int64_t) override { return Status::error(Code::unimplemented, "none"); }
  void release(std::int64_t slot) override { lengths_.set(slot, 0); }
  void watch(Visit) override {}
  void check_between(Check) override {}
  Status fetch(const SiteTensor&, void*) override { return {}; }
  ScoreSizes score_sizes(std::int64_t, std::int64_t) const override { return sizes; }

  ScoreSizes sizes{};
  std::int64_t most_rows = 0, ids_read = 0;
  std::size_t most_runs = 0;
  bool fails = false;

 private:
  static ModelSpec spec_of() {
    ModelConfig m;
    m.hidden_size = 16;
    m.num_hidden_layers = m.num_attention_heads = 1;
    m.intermediate_size = 16;
    m.vocab_size = kVocab;
    return m;
  }
  std::int64_t capacity_;
  DType dtype_;
  ModelSpec spec_;
  SlotLengths lengths_;
  std::vector<Ids> held_;
};

struct Scored {
  std::vector<PromptScore> scores;
  std::int64_t planned = 0, read = 0, most_rows = 0;
  std::size_t most_runs = 0;
};

Scored score(const std::vector<ScorePrompt>& prompts, const ScoreOptions& options, std::int64_t slots,
             DType dtype = DType::f64) {
  auto runner = std::make_unique<Toy>(slots, 64, dtype);
  Toy& toy = *runner;
  Result<Scorer> scorer = Scorer::create(SlotLease::of_all(std::move(runner)), prompts, options);
  INFO(scorer.status().message());
  REQUIRE(scorer);
  while (!scorer->done()) {
    const Status stepped = scorer->step();
    INFO(stepped.message());
    REQUIRE(stepped);
  }
  CHECK(scorer->ids_read() == scorer->ids());
  return {scorer->scores(), scorer->ids(), toy.ids_read, toy.most_rows, toy.most_runs};
}

/// What a prompt must be given: log p by long doubles, the greedy id by the sampler's order.
void check_score(const ScorePrompt& prompt, const PromptScore& score, std::int64_t top) {
  const auto bad = std::find(prompt.ids.begin() + prompt.first - 1, prompt.ids.end() - 1, kNanId);
  const std::int64_t known = bad - prompt.ids.begin() + 1 - prompt.first;
  REQUIRE(std::int64_t(score.ids.size()) == known);
  REQUIRE(std::int64_t(score.top.size()) == known * top);
  if (bad == prompt.ids.end() - 1)
    REQUIRE(score.status);
  else
    REQUIRE(fault_of(score.status, "score: ids[" + std::to_string(prompt.first + known) + "]: logits[3] is NaN") == "");
  for (std::int64_t i = 0; i < known; ++i) {
    const std::int64_t position = prompt.first + i;
    const std::vector<double> logits = logits_behind(std::span(prompt.ids).first(std::size_t(position)));
    long double sum = 0;
    for (double l : logits) sum += std::exp((long double)l);
    const std::int32_t id = prompt.ids[std::size_t(position)];
    const IdScore& got = score.ids[std::size_t(i)];
    REQUIRE(std::abs(double(logits[std::size_t(id)] - std::log(sum)) - got.log_prob) < 1e-14);
    const auto best = std::max_element(logits.begin(), logits.end());
    REQUIRE(got.greedy == (id == std::int32_t(best - logits.begin())));
    for (std::int64_t t = 0; t < top; ++t) {
      const LikelyId& likely = score.top[std::size_t(i * top + t)];
      const double logit = logits[std::size_t(likely.id)];
      const auto above = std::count_if(logits.begin(), logits.end(), [&](const double& l) {
        return l > logit || (l == logit && &l - logits.data() < likely.id);
      });
      REQUIRE(above == t);
      REQUIRE(std::abs(likely.log_prob - double(logit - std::log(sum))) < 1e-14);
    }
  }
}

}  // namespace

TEST_CASE("A row's log-probabilities are within the bound of long doubles", "[score]") {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (std::size_t vocab : {1u, 2u, 7u, 8u, 9u, 1000u, 50304u})
    for (float spread : {0.f, 1.f, 30.f, 1e30f}) {
      std::vector<float> logits;
      for (std::size_t i = 0; i < vocab; ++i) logits.push_back(spread * normal(random));
      const auto row = LogProbs<float>::of(std::span<const float>(logits));
      REQUIRE(row);
      const float most = *std::max_element(logits.begin(), logits.end());
      long double sum = 0;
      for (float l : logits) sum += std::exp((long double)l - most);
      double total = 0;
      for (std::size_t i = 0; i < vocab; ++i) {
        const long double exact = (long double)logits[i] - most - std::log(sum);
        const double got = (*row)[std::int32_t(i)], n = double(vocab);
        // Twice the bound of the first order holds what the higher orders and the long doubles' own errors add.
        const double bound = 2 * 0x1p-53 * (n / 8 + 5 + 3 * std::log(n) + 2 * double(std::abs(exact)));
        REQUIRE(double(std::abs(exact - got)) <= bound);
        total += std::exp(got);
      }
      CHECK(std::abs(total - 1) < 1e-11);
    }
}

TEST_CASE("Equal logits: the lowest id is greedy and comes first among the most likely", "[score]") {
  const std::vector<float> logits{-1, 2, 0, 2, -std::numeric_limits<float>::infinity(), 2};
  const RowScore score = score_row(View<const float, 1>{logits.data(), {6}}, Ids{3, 1, 4}, 9);
  REQUIRE(score.status);
  CHECK(score.next[0] == IdScore{score.next[1].log_prob, false});
  CHECK(score.next[1].greedy);
  CHECK(score.next[2] == IdScore{-std::numeric_limits<double>::infinity(), false});
  Ids order;
  for (const LikelyId& likely : score.top) order.push_back(likely.id);
  CHECK(order == Ids{1, 3, 5, 2, 0, 4});
}

TEST_CASE("A row without log-probabilities is refused, with the first logit that is at fault", "[score][bad]") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto fault = [](std::vector<double> logits, std::string_view text) {
    return fault_of(score_row(View<const double, 1>{logits.data(), {std::int64_t(logits.size())}}, Ids{0}, 1).status,
                    text);
  };
  CHECK(fault({1, std::nan(""), infinity}, "logits[1] is NaN, expected a number below infinity") == "");
  CHECK(fault({1, -infinity, infinity}, "logits[2] is infinity, expected a number below infinity") == "");
  CHECK(fault({-infinity, -infinity}, "every logit is -infinity, expected a finite one") == "");
}

TEST_CASE("Prompts of any lengths and pieces get the log-probabilities of their ids", "[score]") {
  std::mt19937 random(11);
  const auto below = [&](std::int64_t n) { return std::int64_t(random() % std::uint64_t(n)); };
  for (int trial = 0; trial < 300; ++trial) {
    const bool has_nan = trial % 3 == 0;
    std::vector<ScorePrompt> prompts;
    for (std::int64_t n = below(12); n >= 0; --n) {
      ScorePrompt p;
      // Many prompts begin as another one does, up to an id that may lie within a piece.
      if (!prompts.empty() && below(3) > 0) {
        const ScorePrompt& other = prompts[std::size_t(below(std::int64_t(prompts.size())))];
        p.ids.assign(other.ids.begin(), other.ids.begin() + below(std::int64_t(other.ids.size()) + 1));
      }
      for (std::int64_t more = below(20) + (p.ids.size() < 2 ? 2 : 0); more > 0 && p.ids.size() < 65; --more) {
        const auto id = std::int32_t(below(kVocab));
        p.ids.push_back(id == kNanId && !has_nan ? 0 : id);
      }
      p.first = 1 + below(std::int64_t(p.ids.size()) - 1);
      prompts.push_back(p);
    }
    const ScoreOptions options{.piece = 1 + below(20), .top = below(4)};
    const std::int64_t slots = 1 + below(4);
    const Scored all = score(prompts, options, slots);
    CHECK(all.most_rows <= options.piece);
    CHECK((all.read == all.planned || has_nan));
    std::int64_t alone = 0;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      INFO("trial " << trial << ", prompt " << i);
      check_score(prompts[i], all.scores[i], options.top);
      const Scored by_itself = score({prompts[i]}, options, 1);
      CHECK(by_itself.scores[0].ids == all.scores[i].ids);
      CHECK(by_itself.scores[0].top == all.scores[i].top);
      alone += by_itself.planned;
    }
    CHECK(all.planned <= alone);
  }
}

TEST_CASE("Whole pieces that prompts share are read once, and prompts that differ in the last id alone as one",
          "[score]") {
  Ids context;
  for (std::int32_t i = 0; i < 20; ++i) context.push_back((i * 5 + 1) % 7);
  std::vector<ScorePrompt> prompts;
  for (std::int32_t choice : {1, 4, 9, 12}) {
    ScorePrompt p{.ids = context, .first = 20};
    p.ids.push_back(choice);
    prompts.push_back(p);
  }
  CHECK(score(prompts, {.piece = 8}, 1).planned == 20);
  for (ScorePrompt& p : prompts) p.ids.push_back(2);
  CHECK(score(prompts, {.piece = 8}, 1).planned == 16 + 4 * 5);
  prompts[3].first = 12;  // of the second piece other ids are scored
  CHECK(score(prompts, {.piece = 8}, 1).planned == 16 + 4 * 5 + 8);
  CHECK(score(prompts, {.piece = 8}, 4).most_runs == 1);  // one group
  prompts[0].ids[0] = prompts[1].ids[0] = 8;
  CHECK(score(prompts, {.piece = 8}, 4).most_runs == 2);
}

TEST_CASE("16-bit logits are widened before they are scored", "[score]") {
  const std::vector<ScorePrompt> prompts{{{1, 2, 3, 4, 5}, 1}};
  for (DType dtype : {DType::f16, DType::f32}) {  // the toy's logits are exact in both
    const Scored wide = score(prompts, {}, 1), narrow = score(prompts, {}, 1, dtype);
    CHECK(narrow.scores[0].ids == wide.scores[0].ids);
  }
}

TEST_CASE("Prompts that cannot be scored are refused before any is read", "[score][bad]") {
  auto slots = SlotLease::of_all(std::make_unique<Toy>(1, 64, DType::f64));
  const auto fault = [&](std::vector<ScorePrompt> prompts, std::string_view text, const ScoreOptions& options = {}) {
    return fault_of(Scorer::create(slots, std::move(prompts), options).status(), text);
  };
  const ScorePrompt good{{1, 2, 3}, 1};
  CHECK(fault({good, {{}, 1}}, "score: prompt 1: expected at least 2 ids, one to score and one before it, got 0") ==
        "");
  CHECK(fault({{{4}, 1}}, "score: prompt 0: expected at least 2 ids, one to score and one before it, got 1") == "");
  CHECK(fault({{{4, 19}, 1}}, "score: prompt 0[1]: expected an id of 0 to 18, got 19") == "");
  CHECK(fault({{{4, -1}, 1}}, "score: prompt 0[1]: expected an id of 0 to 18, got -1") == "");
  CHECK(fault({{{4, 5}, 2}},
              "score: prompt 0: first: expected 1 to 1, the position of an id with one before it, got 2") == "");
  CHECK(fault({{{4, 5}, 0}}, "first: expected 1 to 1") == "");
  CHECK(fault({{Ids(66, 1), 1}},
              "score: prompt 0: expected at most 65 ids, one more than the cache's capacity, got 66") == "");
  CHECK(fault({good}, "score: piece: expected at least 0, got -1", {.piece = -1}) == "");
  CHECK(fault({good}, "score: top: expected 0 to 19, got 20", {.top = 20}) == "");
  CHECK(message_of(Scorer::create(slots, {{Ids(65, 1), 1}}).status()) == "");

  Toy toy(1, 64, DType::f64);
  const Run run{.count = 2};
  const std::int64_t rows = 1;
  const std::vector<Ids> none, outside{{19}}, one{{3}};
  const auto refused = [&](const std::vector<Ids>& next, std::int64_t top, std::string_view text) {
    return fault_of(toy.score({&run, 1}, Ids{1, 2}, {.rows = {&rows, 1}, .next = next, .top = top}).status(), text);
  };
  CHECK(refused(none, 0, "score: next: expected a list of ids for each of 1 rows, got 0") == "");
  CHECK(refused(outside, 0, "score: next[0][0]: expected an id of 0 to 18, got 19") == "");
  CHECK(refused(one, -1, "score: top: expected 0 to 19, got -1") == "");
  CHECK(toy.length(0) == 0);
}

TEST_CASE("A runner says how prompts are cut where nothing else is asked for, and how many rows a step makes",
          "[score]") {
  std::vector<ScorePrompt> prompts;
  for (std::int32_t i = 0; i < 6; ++i) prompts.push_back({{i, 8, 9, 10, 11, 12, 13, 14, 15}, 1});
  const auto steps_of = [&](const ScoreOptions& options) {
    auto runner = std::make_unique<Toy>(6, 64, DType::f64);
    Toy& toy = *runner;
    toy.sizes = {.piece = 4, .rows = 20};
    Result<Scorer> scorer = Scorer::create(SlotLease::of_all(std::move(runner)), prompts, options);
    REQUIRE(scorer);
    while (!scorer->done()) REQUIRE(scorer->step());
    for (std::size_t i = 0; i < prompts.size(); ++i) check_score(prompts[i], scorer->scores()[i], 0);
    return std::pair(toy.most_rows, toy.most_runs);
  };
  CHECK(steps_of({}) == std::pair(std::int64_t(20), std::size_t(5)));
  CHECK(steps_of({.piece = 2}) == std::pair(std::int64_t(12), std::size_t(6)));
}

TEST_CASE("No prompts are scored at once, a step that failed can be made again, slots that are gone end it",
          "[score]") {
  auto runner = std::make_unique<Toy>(1, 64, DType::f64);
  Toy& toy = *runner;
  auto slots = SlotLease::of_all(std::move(runner));
  auto none = Scorer::create(slots, {});
  REQUIRE(none);
  CHECK(none->done());
  CHECK(none->step());

  const ScorePrompt prompt{{1, 2, 3, 4, 5, 6}, 2};
  auto scorer = Scorer::create(slots, {prompt}, {.piece = 2});
  REQUIRE(scorer);
  REQUIRE(scorer->step());
  toy.fails = true;
  CHECK(refusal_fault(scorer->step(), Code::device_error, {"lost"}) == "");
  CHECK(scorer->ids_read() == 2);
  toy.fails = false;
  while (!scorer->done()) REQUIRE(scorer->step());
  check_score(prompt, scorer->scores()[0], 0);

  auto left = Scorer::create(slots, {prompt});
  REQUIRE(left);
  slots->close();
  CHECK(!left->step());
  CHECK(!left->done());
}
