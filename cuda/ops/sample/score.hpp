#pragma once
// What rows of logits say about given ids. core/model/score.hpp says what is asked; score_row() is the same on the host.
#include <cstdint>
#include <span>

#include "core/model/score.hpp"
#include "core/view.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// A logit, widened to float32, and its id.
struct LogitOf {
  float logit;
  std::int32_t id;
};

/// What the log-probabilities of a row of logits l (vocab) need.
struct RowSum {
  /// The sum over j of round(exp(l[j] - m) * 2^kWeightBits), m = max(l). Sums of integers do not depend on their order.
  std::uint64_t weights;
  /// m and its id, of equal ones the lowest. Where the row has no log-probabilities it is the first logit that is NaN or
  /// +infinity, or -infinity where there is no other, and `weights` is 0.
  LogitOf most;
};

/// The most likely ids of a row that the device names at most. Each of them takes one pass over the row.
inline constexpr std::int64_t kMostLikely = 64;

/// Rows of logits, what is asked of them, and where the answers go. All of it is device memory.
struct ScoreArgs {
  ConstAnyView<2> logits;                // (rows, vocab), float16, bfloat16 or float32
  View<const std::int32_t, 1> next_end;  // (rows): one past a row's last id in `next`
  View<const std::int32_t, 1> next;      // the ids that all rows are asked for
  std::int64_t next_begin = 0;           // where the first row's ids begin in `next`
  RowSum* sums = nullptr;                // (rows)
  float* next_logits = nullptr;          // the logits of the ids in `next`, each in its own row
  LogitOf* likely = nullptr;  // (rows, top): the highest logits, the highest first, of equal ones the lowest id
  std::int64_t top = 0;
};

/// Adds the launch that answers for all rows. A block has a row, which it reads twice, and once more for each likely id.
/// Refuses, by name, what is null, misaligned or not in the device's memory; a vocabulary outside 1 to
/// sampling::kMostTokens; and `top` outside 0 to the vocabulary or kMostLikely.
Status prepare(const ScoreArgs&, LaunchList&);

/// A row's answers as its score. `next` are the ids that it was asked for.
///   log p(i) = (l[i] - m) - log(weights * 2^-kWeightBits)
/// The error beside LogProbs of the same logits is at most, to first order in u = 2^-24,
///   u (2 + log(vocab)) + vocab * 2^-(kWeightBits + 1) + 2^-40,
/// or 7.7e-7 for 50304 logits. Parts: 2 from expf, which is within one unit in the last place; log(vocab) from the
/// rounding of l[j] - m to float32, since the sum over j of p(j) (m - l[j]) is at most the entropy of p; 1/2 from each
/// weight's rounding, beside a sum of 2^kWeightBits at least; and what float64 rounds here and in LogProbs.
RowScore row_score(const RowSum& sum, std::span<const std::int32_t> next, std::span<const float> next_logits,
                   std::span<const LogitOf> likely);

}  // namespace cf::cuda
