#pragma once
// The log-probabilities of a row of logits, on the host in float64.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.hpp"

namespace cf {

/// Why a row has no log-probabilities: its logit `id` is NaN or +infinity; or it is -infinity, as all others are.
inline Status refused_logit(std::int64_t id, double logit) {
  if (logit == -std::numeric_limits<double>::infinity())
    return Status::error(Code::invalid_argument, "every logit is -infinity, expected a finite one");
  return Status::error(Code::invalid_argument, "logits[" + std::to_string(id) + "] is " +
                                                   (std::isnan(logit) ? "NaN" : "infinity") +
                                                   ", expected a number below infinity");
}

/// The log-probabilities of a row of logits l (vocab), float or double:
///   log p(i) = (l[i] - m) - log(s),   m = max(l),   s = sum over j of exp(l[j] - m)
/// `s` is summed in eight parts: part k has the terms of j = k, k + 8, ... in this order. Equal logits give equal bits.
/// The error of log p(i) is at most, to first order in u = 2^-53,
///   u (vocab / 8 + 5 + 3 log(vocab) + 2 |log p(i)|),
/// or 7e-13 for 50304 logits and log p(i) = 0. Parts: vocab / 8 + 3 from the roundings of the sum; 2 from exp, which is
/// within one unit in the last place; log(vocab) from the roundings of l[j] - m, since the sum over j of
/// p(j) (m - l[j]) is at most the entropy of p; 2 log(vocab) from log; 2 |log p(i)| from the two subtractions.
/// Logits of -infinity have the probability 0.
template <class Real>
class LogProbs {
 public:
  /// Refuses what Sampling refuses of a row: a logit that is NaN or +infinity (the first one is named), and a row whose
  /// logits are all -infinity. The logits must outlive the object.
  static Result<LogProbs> of(std::span<const Real> logits) {
    constexpr std::size_t parts = 8;
    LogProbs row(logits);
    for (Real l : logits) row.most_ = std::max(row.most_, l);  // leaves NaN out
    std::array<double, parts> sums{};
    for (std::size_t i = 0; i < logits.size(); ++i) sums[i % parts] += std::exp(double(logits[i]) - double(row.most_));
    for (std::size_t half = parts / 2; half > 0; half /= 2)
      for (std::size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
    // NaN and +infinity make the sum NaN, and so do logits that are all -infinity.
    if (!std::isfinite(sums[0])) return fault_of(logits);
    row.log_sum_ = std::log(sums[0]);
    return row;
  }

  /// log p(id), in nats. `id` is one of the row's.
  double operator[](std::int32_t id) const { return double(logits_[std::size_t(id)]) - double(most_) - log_sum_; }
  /// The most likely id, of equal ones the lowest: the id that greedy decoding takes.
  std::int32_t best() const { return std::int32_t(std::find(logits_.begin(), logits_.end(), most_) - logits_.begin()); }
  /// The `count` most likely ids, or all where there are fewer; the most likely first, the lower of equally likely ones
  /// first.
  std::vector<std::int32_t> top(std::size_t count) const {
    if (count == 0) return {};
    std::vector<std::int32_t> ids(logits_.size());
    std::iota(ids.begin(), ids.end(), 0);
    const auto end = ids.begin() + std::ptrdiff_t(std::min(count, ids.size()));
    std::partial_sort(ids.begin(), end, ids.end(), [&](std::int32_t a, std::int32_t b) {
      const Real x = logits_[std::size_t(a)], y = logits_[std::size_t(b)];
      return x != y ? x > y : a < b;
    });
    ids.erase(end, ids.end());
    return ids;
  }

 private:
  explicit LogProbs(std::span<const Real> logits) : logits_(logits) {}

  static Status fault_of(std::span<const Real> logits) {
    for (std::size_t i = 0; i < logits.size(); ++i)
      if (!(logits[i] < std::numeric_limits<Real>::infinity()))
        return refused_logit(std::int64_t(i), double(logits[i]));
    return refused_logit(0, -std::numeric_limits<double>::infinity());
  }

  std::span<const Real> logits_;
  Real most_ = -std::numeric_limits<Real>::infinity();
  double log_sum_ = 0;
};

}  // namespace cf
