#include "apps/bench/score_bench.hpp"

#include <algorithm>
#include <chrono>

#include "apps/bench/model_bench.hpp"
#include "core/model/score.hpp"

namespace cf::apps {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// Reads all ids of the texts but the last one of each, and waits for the device.
Status prefill(const SlotLease& slots, const std::vector<ScorePrompt>& texts) {
  CF_TRY_ASSIGN(ModelRunner* const runner, slots.runner());
  for (std::size_t first = 0; first < texts.size(); first += std::size_t(slots.slots())) {
    std::vector<Run> runs;
    std::vector<std::int32_t> ids;
    for (std::size_t i = first; i < texts.size() && std::int64_t(runs.size()) < slots.slots(); ++i) {
      const std::vector<std::int32_t>& text = texts[i].ids;
      runs.push_back(
          {.sequence = slots[std::int64_t(runs.size())], .first_position = 0, .count = std::int64_t(text.size()) - 1});
      ids.insert(ids.end(), text.begin(), text.end() - 1);
    }
    CF_TRY(runner->run(runs, ids, {}));
  }
  return runner->logits(slots[0]).status();
}

Status score(const std::shared_ptr<SlotLease>& slots, const std::vector<ScorePrompt>& texts) {
  CF_TRY_ASSIGN(Scorer scorer, Scorer::create(slots, texts));
  while (!scorer.done()) CF_TRY(scorer.step());
  for (const PromptScore& text : scorer.scores()) CF_TRY(text.status);
  return {};
}

}  // namespace

Result<ScoreTiming> time_scores(const std::shared_ptr<SlotLease>& slots, const ScoreLoad& load, std::int64_t runs,
                                std::int64_t warmup, const std::function<void()>& done) {
  CF_TRY_ASSIGN(const ModelRunner* const runner, slots->runner());
  std::vector<ScorePrompt> texts;
  for (std::int64_t i = 0; i < load.texts; ++i)
    texts.push_back({.ids = prompt_of(load.prompt_len + 1, i, runner->model().shape.vocab_size),
                     .first = load.prompt_len + 1 - load.scored});
  std::vector<double> prefill_ms, score_ms;
  for (std::int64_t run = -warmup; run < runs; ++run) {
    const Clock::time_point begin = Clock::now();
    CF_TRY(prefill(*slots, texts));
    const double prefilled = milliseconds_since(begin);
    const Clock::time_point middle = Clock::now();
    CF_TRY(score(slots, texts));
    const double scored = milliseconds_since(middle);
    done();
    if (run < 0) continue;
    prefill_ms.push_back(prefilled);
    score_ms.push_back(scored);
  }
  return ScoreTiming{.score_ms = spread(score_ms), .prefill_ms = spread(prefill_ms)};
}

}  // namespace cf::apps
