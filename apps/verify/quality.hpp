#pragma once
// How good a model's predictions are, and how far they are from a reference's: the figures of llama.cpp's perplexity
// tool.
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "apps/cli/statistics.hpp"

namespace cf::apps {

/// The logits of one position: all of them, or the largest with their ids and the log of the sum of exp over all.
struct LogitsRow {
  std::span<const double> values;
  std::span<const std::int32_t> ids{};  // of the values; empty where there is a value for each id
  std::optional<double> log_sum_exp{};  // over all ids; computed where it is not given

  std::int32_t id(std::size_t place) const { return ids.empty() ? std::int32_t(place) : ids[place]; }
  /// The logit of an id, where the row has it.
  std::optional<double> of(std::int32_t id) const;
  /// The log of the sum of exp over all ids.
  double sum() const;
};

/// log(sum of exp(v)), from the largest value.
double log_sum_exp(std::span<const double> values);

/// The id of the largest value, the lowest of equal ones.
std::int32_t best_id(std::span<const double> values);

/// Our predictions beside a reference's, over the same positions. p is the reference's probability, q ours.
struct Divergence {
  std::vector<double> kl;  // by position: sum of p log(p / q); ids that the reference lacks count as one id
  std::vector<double> probability_change;  // by position: q - p of the id that came next
  std::int64_t top_1 = 0;                  // positions where both have the same largest logit
  double top_5 = 0, top_10 = 0;      // summed over positions: the share of the reference's largest that ours has too
  double absolute = 0, largest = 0;  // of the differences between logits: the sum, and the largest
  std::int64_t logits = 0;           // that were compared
  double error2 = 0, norm2 = 0;      // sums of squares: of the differences, and of the reference's logits
  std::optional<std::int64_t> diverged{};  // the first position where the largest logits differ
  double margin = 0;                       // at that position: the reference's largest logit minus that of our choice

  double rel_l2() const;
};

/// What is known of a series of positions, teacher-forced.
struct Quality {
  std::int64_t positions = 0;
  std::vector<double> nll;            // -log q of the id that came next, of the positions whose logits have it
  std::vector<double> reference_nll;  // the same of the reference, of the positions where both have it
  std::vector<double> nll_change;     // there: ours minus the reference's
  std::optional<Divergence> divergence{};

  /// Adds a position of which the log-probability of the id that came next is known alone.
  void add(double log_prob) {
    ++positions;
    nll.push_back(-log_prob);
  }
  /// Adds a position: our logits, and the id that came next.
  void add(const LogitsRow& ours, std::int32_t next);
  /// The same beside a reference. Where ours has ids, they are the reference's.
  void add(const LogitsRow& ours, std::int32_t next, const LogitsRow& reference);

  /// Whether the logits of every position have the id that came next. A perplexity of some positions alone would be
  /// that of likely ids.
  bool knows_all() const { return positions > 0 && std::int64_t(nll.size()) == positions; }
  /// exp of the mean nll; to first order its error is the mean's times itself.
  Mean perplexity() const;
  Mean reference_perplexity() const;
};

}  // namespace cf::apps
