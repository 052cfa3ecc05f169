#pragma once
// Times log-probabilities of given ids beside a prefill of the same ids.
#include <cstdint>
#include <functional>
#include <memory>

#include "apps/bench/timing.hpp"
#include "core/model/slot_lease.hpp"

namespace cf::apps {

/// Texts of prompt_len ids and one that is not read. The last `scored` ids of each are scored.
struct ScoreLoad {
  std::int64_t prompt_len = 1, scored = 1, texts = 1;

  std::int64_t ids() const { return prompt_len * texts; }
};

struct ScoreTiming {
  Spread score_ms;    // over the runs: all texts, from ids to scores on the host
  Spread prefill_ms;  // over the runs: the ids that scoring reads, and the last one's logits of each text

  /// Ids that are read a second.
  double score_ids_per_s(const ScoreLoad& load) const { return 1e3 * double(load.ids()) / score_ms.median; }
  double prefill_ids_per_s(const ScoreLoad& load) const { return 1e3 * double(load.ids()) / prefill_ms.median; }
  /// The speed of scoring over that of the prefill, in percent.
  double percent_of_prefill() const { return 100 * prefill_ms.median / score_ms.median; }
};

/// Times a load `runs` times after `warmup` runs, by the host's clock: in each run a prefill of all texts, as many at a
/// time as there are slots, and then their scores. `done` is called after each run.
Result<ScoreTiming> time_scores(const std::shared_ptr<SlotLease>& slots, const ScoreLoad& load, std::int64_t runs,
                                std::int64_t warmup, const std::function<void()>& done);

}  // namespace cf::apps
