#pragma once
// Drafts: guesses of a sequence's next ids. One step verifies a whole draft. The sequence gets the same ids as from
// steps of one token.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/model/runner.hpp"
#include "core/status.hpp"

namespace cf {

/// The most ids of a draft that a step verifies. With the token before them they are a run of 8: so many tokens share
/// each read of a weight at little cost.
inline constexpr std::int64_t kMostDraft = 7;

/// Makes a draft: up to `most` ids, at least 1, that may follow `tokens`, a sequence's prompt and its ids so far. What is
/// beyond `most` is left out. Where it fails, the sequence fails with its Status.
using Drafter =
    std::function<Result<std::vector<std::int32_t>>(std::span<const std::int32_t> tokens, std::int64_t most)>;

/// The numbers of last tokens that a lookup looks for.
struct LookupSizes {
  std::int64_t longest = 3, shortest = 2;
};

/// Prompt lookup: looks for the last n of `tokens` (any number of them) earlier among them, for n from longest down to
/// shortest. Of the first n that is found it takes the latest occurrence, which may overlap the end, and returns the
/// `most` tokens behind it. Where these reach the end, they go on with the draft itself, as a period does. None where
/// nothing is found, and for sizes or `most` below 1.
/// Source: Saxena 2023, "Prompt Lookup Decoding", github.com/apoorvumang/prompt-lookup-decoding, which takes the first
/// occurrence and ends with the tokens.
std::vector<std::int32_t> lookup_draft(std::span<const std::int32_t> tokens, std::int64_t most,
                                       const LookupSizes& sizes = {});

/// lookup_draft() as a sequence takes it.
Drafter lookup_drafter(const LookupSizes& sizes = {});

/// How long the next draft of a sequence may be, by what became of those before. It is 2 ids at first. Where some of a
/// draft's ids are accepted it becomes twice as many as these, up to `most`; where all are, it never falls. Where none
/// is, it becomes half; below 1, steps without drafts come first: 4, then twice as many each time, up to 64, until an id
/// is accepted. So right drafts are soon long, and wrong ones cost little.
class DraftLength {
 public:
  explicit DraftLength(std::int64_t most = kMostDraft);
  /// The most ids of the next step's draft; 0 where it has none. Called once for each step that could have one.
  std::int64_t next();
  /// Of a draft of `drafted` ids, at least 1, `accepted` were accepted.
  void verified(std::int64_t drafted, std::int64_t accepted);

 private:
  static constexpr std::int64_t kFirst = 2, kShortestPause = 4, kLongestPause = 64;
  std::int64_t most_, length_;
  std::int64_t pause_ = kShortestPause, left_ = 0;  // steps without drafts: of the next pause, and of this one
};

/// What became of a sequence's drafts.
struct DraftCounts {
  std::int64_t steps = 0;     // that verified a draft
  std::int64_t drafted = 0;   // ids of these drafts
  std::int64_t accepted = 0;  // of them, those that the sequence was given
  bool operator==(const DraftCounts&) const = default;
};

/// A second base of those ModelRunners that can verify drafts.
class ExactRuns {
 public:
  virtual ~ExactRuns() = default;
  /// The tokens of the longest run whose rows of logits have the bits that steps of one token give, whatever else is in
  /// the steps. Below 2 where there is none: a verified id might then be another than the one that a step gives.
  virtual std::int64_t exact_run_tokens() const = 0;
};

/// A runner's exact_run_tokens(); 0 where it is no ExactRuns.
std::int64_t exact_run_tokens(const ModelRunner& runner);

}  // namespace cf
