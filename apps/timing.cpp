#include "apps/timing.hpp"

#include <algorithm>

namespace cf::apps {
namespace {

/// The sorted series' value at a fraction of its length.
double percentile(const std::vector<double>& sorted, double fraction) {
  const double at = fraction * double(sorted.size() - 1);
  const auto low = std::size_t(at);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - double(low)) * (sorted[high] - sorted[low]);
}

}  // namespace

Spread spread(std::vector<double> series) {
  std::sort(series.begin(), series.end());
  return {percentile(series, 0.5), percentile(series, 0.1), percentile(series, 0.99)};
}

}  // namespace cf::apps
