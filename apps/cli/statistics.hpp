#pragma once
// What is said of a series of numbers.
#include <cmath>
#include <cstddef>
#include <span>

namespace cf::apps {

/// The value below which the fraction of a sorted series lies, linear between neighbours. The series is not empty.
inline double percentile(std::span<const double> sorted, double fraction) {
  const double place = fraction * double(sorted.size() - 1);
  const auto below = std::size_t(place);
  const std::size_t above = below + 1 < sorted.size() ? below + 1 : below;
  return sorted[below] + (place - double(below)) * (sorted[above] - sorted[below]);
}

/// A mean and its standard error: the deviation of the values over the square root of their number.
struct Mean {
  double mean = 0, error = 0;
};

/// The mean of a series that is not empty.
inline Mean mean_of(std::span<const double> series) {
  double sum = 0, squares = 0;
  for (double v : series) sum += v;
  const auto n = double(series.size());
  for (double v : series) squares += (v - sum / n) * (v - sum / n);
  return {sum / n, n > 1 ? std::sqrt(squares / (n - 1) / n) : 0};
}

}  // namespace cf::apps
