#include "apps/verify/quality.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace cf::apps {
namespace {

/// The places of the `count` largest values, the largest first, the lower place of equal ones first.
std::vector<std::int32_t> largest_of(std::span<const double> values, std::size_t count) {
  std::vector<std::int32_t> places(values.size());
  std::iota(places.begin(), places.end(), 0);
  count = std::min(count, places.size());
  std::partial_sort(places.begin(), places.begin() + std::ptrdiff_t(count), places.end(), [&](auto a, auto b) {
    const double x = values[std::size_t(a)], y = values[std::size_t(b)];
    return x != y ? x > y : a < b;
  });
  places.resize(count);
  return places;
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

double Divergence::rel_l2() const { return norm2 > 0 ? std::sqrt(error2 / norm2) : 0; }

void Quality::add(std::span<const double> ours, std::int32_t next) {
  nll.push_back(log_sum_exp(ours) - ours[std::size_t(next)]);
}

void Quality::add(std::span<const double> ours, std::int32_t next, const LogitsRow& reference) {
  if (!divergence) divergence.emplace();
  Divergence& d = *divergence;
  const double our_sum = log_sum_exp(ours);
  const double their_sum = reference.log_sum_exp ? *reference.log_sum_exp : log_sum_exp(reference.values);
  const auto id_of = [&](std::size_t i) { return reference.ids.empty() ? std::int32_t(i) : reference.ids[i]; };
  const std::int64_t position = positions();
  nll.push_back(our_sum - ours[std::size_t(next)]);

  double kl = 0, p_total = 0, q_total = 0;
  std::optional<double> p_next;
  for (std::size_t i = 0; i < reference.values.size(); ++i) {
    const double theirs = reference.values[i], mine = ours[std::size_t(id_of(i))], error = mine - theirs;
    const double log_p = theirs - their_sum, log_q = mine - our_sum, p = std::exp(log_p);
    kl += p * (log_p - log_q);
    p_total += p;
    q_total += std::exp(log_q);
    d.absolute += std::abs(error);
    d.largest = std::max(d.largest, std::abs(error));
    d.error2 += error * error;
    d.norm2 += theirs * theirs;
    if (id_of(i) == next) p_next = log_p;
  }
  d.logits += std::int64_t(reference.values.size());
  // The ids that the reference leaves out count as one: the divergence is at least that.
  const double p_rest = 1 - p_total, q_rest = 1 - q_total;
  if (!reference.ids.empty() && p_rest > 0 && q_rest > 0) kl += p_rest * std::log(p_rest / q_rest);
  d.kl.push_back(kl);
  if (p_next) {
    reference_nll.push_back(-*p_next);
    nll_change.push_back(nll.back() - reference_nll.back());
    d.probability_change.push_back(std::exp(-nll.back()) - std::exp(*p_next));
  }

  const std::vector<std::int32_t> our_best = largest_of(ours, 10), their_best = largest_of(reference.values, 10);
  const auto shared = [&](std::size_t count) {
    count = std::min(count, their_best.size());
    const auto end = our_best.begin() + std::ptrdiff_t(std::min(count, our_best.size()));
    const auto found = std::count_if(their_best.begin(), their_best.begin() + std::ptrdiff_t(count), [&](auto place) {
      return std::find(our_best.begin(), end, id_of(std::size_t(place))) != end;
    });
    return double(found) / double(count);
  };
  const bool same = id_of(std::size_t(their_best[0])) == our_best[0];
  d.top_1 += same;
  d.top_5 += shared(5);
  d.top_10 += shared(10);
  if (!same && !d.diverged) {
    d.diverged = position;
    d.margin = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < reference.values.size(); ++i)
      if (id_of(i) == our_best[0]) d.margin = reference.values[std::size_t(their_best[0])] - reference.values[i];
  }
}

Mean Quality::perplexity() const { return perplexity_of(nll); }

Mean Quality::reference_perplexity() const { return perplexity_of(reference_nll); }

}  // namespace cf::apps
