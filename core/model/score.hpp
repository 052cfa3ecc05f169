#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/model/runner.hpp"
#include "core/model/slot_lease.hpp"
#include "core/status.hpp"
#include "core/view.hpp"

namespace cf {

/// What ModelRunner::score() is asked of a step.
struct ScoreRequest {
  /// The last rows[i] tokens of run i make a row of logits each. The rows of the first run come first.
  std::span<const std::int64_t> rows;
  /// By row: the ids whose log-probability behind the row's token is asked for.
  std::span<const std::vector<std::int32_t>> next;
  /// How many of the most likely ids are named besides.
  std::int64_t top = 0;
};

/// Of an id: log p(id | the ids before it), in nats, and whether it is the most likely one, of equal ones the lowest.
struct IdScore {
  double log_prob = 0;
  bool greedy = false;
  bool operator==(const IdScore&) const = default;
};

struct LikelyId {
  std::int32_t id = 0;
  double log_prob = 0;
  bool operator==(const LikelyId&) const = default;
};

/// What a row of logits says, by the formula of LogProbs.
struct RowScore {
  Status status{};              // what LogProbs refuses; the lists are then empty
  std::vector<IdScore> next{};  // in the order of the request
  std::vector<LikelyId> top{};  // the most likely first
};

/// The score of one row, (vocab) on the host, in any dtype of activations.
RowScore score_row(ConstAnyView<1> logits, std::span<const std::int32_t> next, std::int64_t top);

/// Calls f(0), ..., f(n - 1), in any order, on as many threads as it likes.
using ForEach = std::function<Status(std::int64_t n, const std::function<void(std::int64_t)>& f)>;

/// ModelRunner::score() by way of run(): all rows' logits are made on the host, and `for_each` goes through them.
Result<std::vector<RowScore>> score_on_host(ModelRunner& runner, std::span<const Run> runs,
                                            std::span<const std::int32_t> ids, const ScoreRequest& request,
                                            const ForEach& for_each);

/// Refuses a request: other `next` than one list a row, ids in it outside the vocabulary, and `top` outside 0 .. vocab.
Status check_request(const ModelSpec& model, const ScoreRequest& request);

/// A prompt whose ids are scored, from position `first` on. The id at position 0 has no prediction.
struct ScorePrompt {
  std::vector<std::int32_t> ids;
  std::int64_t first = 1;
};

struct ScoreOptions {
  /// How many ids of a prompt a step reads at most; 0: as many as ModelRunner::score_sizes() says.
  std::int64_t piece = 0;
  /// How many of the most likely ids are named for each scored one.
  std::int64_t top = 0;
};

/// What is known of a prompt's ids. Where `status` is not ok the lists end before the id that has no log-probability.
struct PromptScore {
  std::vector<IdScore> ids;   // of position `first`, of the next one, ...
  std::vector<LikelyId> top;  // `top` for each of these, the most likely first
  Status status;
};

/// Scores the ids of prompts: log p(id | the ids before it), by the formula of LogProbs. A step makes no more rows of
/// logits than a piece has ids or score_sizes() says, however many ids are scored. Not shared between threads.
///   A prompt is read in pieces, which begin at the multiples of `piece`, whatever it shares with others. Prompts that
/// begin with the same pieces, of which the same ids are scored, have them read once. So a prompt's scores depend on no
/// other prompt, bit for bit, where the runner gives a run the same alone and in a step with others.
///   The last id of a prompt is scored and not read.
class Scorer {
 public:
  /// Uses the slots of an open lease, and replaces what they hold. Refuses a prompt of fewer than two ids, with an id
  /// outside the vocabulary or with more ids before the last one than entry_limit() allows; `first` outside
  /// 1 .. ids - 1; `piece` below 0; and `top` outside 0 .. vocab.
  static Result<Scorer> create(std::shared_ptr<SlotLease> slots, std::vector<ScorePrompt> prompts,
                               const ScoreOptions& options = {});
  Scorer(Scorer&&) noexcept;
  Scorer& operator=(Scorer&&) noexcept;
  ~Scorer();

  /// How many ids all steps read, and how many of them were read.
  std::int64_t ids() const;
  std::int64_t ids_read() const;
  bool done() const;
  /// Makes one step of the model. An error is the runner's, or says that the slots were given back; the step may be
  /// tried again. A prompt with a row of logits that has no log-probabilities, such as a NaN, ends with a status; the
  /// others go on.
  Status step();
  /// The scores, in the order of the prompts. They are all known once done() is true.
  const std::vector<PromptScore>& scores() const;

 private:
  struct State;
  explicit Scorer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace cf
