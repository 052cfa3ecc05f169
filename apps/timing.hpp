#pragma once
// What every benchmark measures and how it is summed up.
#include <cstdint>
#include <string>
#include <vector>

namespace cf::apps {

struct BenchOptions {
  std::int64_t runs = 20, warmup = 3;
  bool warm = false;  // leave the weights and the cache where the last run has put them
};

/// A series in order: its median and the percentiles around it, linear between neighbours.
struct Spread {
  double median = 0, p10 = 0, p99 = 0;
  /// (p99 - p10) / median in percent.
  double noise_percent() const { return median > 0 ? 100 * (p99 - p10) / median : 0; }
};

/// The spread of a series that is not empty.
Spread spread(std::vector<double> series);

/// What one site, or the whole layer, took and moved.
struct Timing {
  std::string site, op;
  Spread time_us;
  double bytes = 0;  // compulsory: Op::cost
  double gb_per_s() const { return bytes / time_us.median * 1e-3; }
};

}  // namespace cf::apps
