#include "apps/verify/quality.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace cf::apps {
namespace {

/// The ids of the `count` largest logits, the largest first, the lower id of equal ones first.
std::vector<std::int32_t> largest_of(const LogitsRow& row, std::size_t count) {
  std::vector<std::size_t> places(row.values.size());
  std::iota(places.begin(), places.end(), std::size_t(0));
  count = std::min(count, places.size());
  std::partial_sort(places.begin(), places.begin() + std::ptrdiff_t(count), places.end(), [&](auto a, auto b) {
    const double x = row.values[a], y = row.values[b];
    return x != y ? x > y : row.id(a) < row.id(b);
  });
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(row.id(places[i]));
  return ids;
}

Mean perplexity_of(std::span<const double> nll) {
  const Mean m = mean_of(nll);
  return {std::exp(m.mean), std::exp(m.mean) * m.error};
}

}  // namespace

double log_sum_exp(std::span<const double> values) {
  const double most = *std::max_element(values.begin(), values.end());
  double sum = 0;
  for (double v : values) sum += std::exp(v - most);
  return most + std::log(sum);
}

std::int32_t best_id(std::span<const double> values) {
  return std::int32_t(std::max_element(values.begin(), values.end()) - values.begin());
}

std::optional<double> LogitsRow::of(std::int32_t id) const {
  if (ids.empty()) return values[std::size_t(id)];
  const auto found = std::find(ids.begin(), ids.end(), id);
  return found == ids.end() ? std::nullopt : std::optional(values[std::size_t(found - ids.begin())]);
}

double LogitsRow::sum() const { return log_sum_exp ? *log_sum_exp : cf::apps::log_sum_exp(values); }

double Divergence::rel_l2() const { return norm2 > 0 ? std::sqrt(error2 / norm2) : 0; }

void Quality::add(const LogitsRow& ours, std::int32_t next) {
  ++positions;
  if (const std::optional<double> logit = ours.of(next)) nll.push_back(ours.sum() - *logit);
}

void Quality::add(const LogitsRow& ours, std::int32_t next, const LogitsRow& reference) {
  if (!divergence) divergence.emplace();
  Divergence& d = *divergence;
  const double our_sum = ours.sum(), their_sum = reference.sum();
  const std::int64_t position = positions;
  add(ours, next);

  double kl = 0, p_total = 0, q_total = 0;
  for (std::size_t i = 0; i < reference.values.size(); ++i) {
    const double theirs = reference.values[i];
    const double mine = ours.ids.empty() ? ours.values[std::size_t(reference.id(i))] : ours.values[i];
    const double log_p = theirs - their_sum, log_q = mine - our_sum, p = std::exp(log_p), error = mine - theirs;
    kl += p * (log_p - log_q);
    p_total += p;
    q_total += std::exp(log_q);
    d.absolute += std::abs(error);
    d.largest = std::max(d.largest, std::abs(error));
    d.error2 += error * error;
    d.norm2 += theirs * theirs;
  }
  d.logits += std::int64_t(reference.values.size());
  // The ids that the reference leaves out count as one: the divergence is at least that.
  const double p_rest = 1 - p_total, q_rest = 1 - q_total;
  if (!reference.ids.empty() && p_rest > 0 && q_rest > 0) kl += p_rest * std::log(p_rest / q_rest);
  d.kl.push_back(kl);
  const std::optional<double> our_logit = ours.of(next), their_logit = reference.of(next);
  if (our_logit && their_logit) {
    const double log_p = *their_logit - their_sum, log_q = *our_logit - our_sum;
    reference_nll.push_back(-log_p);
    nll_change.push_back(log_p - log_q);
    d.probability_change.push_back(std::exp(log_q) - std::exp(log_p));
  }

  const std::vector<std::int32_t> our_best = largest_of(ours, 10), their_best = largest_of(reference, 10);
  const auto shared = [&](std::size_t count) {
    count = std::min(count, their_best.size());
    const auto end = our_best.begin() + std::ptrdiff_t(std::min(count, our_best.size()));
    const auto found = std::count_if(their_best.begin(), their_best.begin() + std::ptrdiff_t(count),
                                     [&](std::int32_t id) { return std::find(our_best.begin(), end, id) != end; });
    return double(found) / double(count);
  };
  const bool same = their_best[0] == our_best[0];
  d.top_1 += same;
  d.top_5 += shared(5);
  d.top_10 += shared(10);
  if (!same && !d.diverged) {
    d.diverged = position;
    const std::optional<double> theirs = reference.of(our_best[0]);
    d.margin = theirs ? *reference.of(their_best[0]) - *theirs : std::numeric_limits<double>::infinity();
  }
}

Mean Quality::perplexity() const { return perplexity_of(nll); }

Mean Quality::reference_perplexity() const { return perplexity_of(reference_nll); }

}  // namespace cf::apps
