#pragma once
// What every benchmark measures, and how a series of times is summed up.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cf::apps {

struct BenchOptions {
  std::int64_t runs = 20, warmup = 3;
  bool warm = false;  // do not empty caches between runs
};

/// The median and two percentiles of a series, linear between neighbours.
struct Spread {
  double median = 0, p10 = 0, p99 = 0;
  /// (p99 - p10) / median in percent.
  double noise_percent() const { return median > 0 ? 100 * (p99 - p10) / median : 0; }
};

/// The spread of a series that is not empty.
Spread spread(std::vector<double> series);

/// One site, or a whole layer: its time and the bytes that it must move.
struct Timing {
  std::string site, op;
  Spread time_us;
  double bytes = 0;      // compulsory: Op::cost
  double own_bytes = 0;  // of `bytes`, those that no other layer reads or writes: weights and cache entries
  double gb_per_s() const { return bytes / time_us.median * 1e-3; }
};

/// What is known of a cache while a series of runs is timed. A run goes through `layers` layers one after the other.
struct CacheUse {
  std::string_view name;        // "the L2"
  double cache_bytes = 0;       // its size; infinity where the size is unknown
  double layers = 1;            // that a run goes through
  bool evicts_weights = false;  // weights and cache entries are removed from the cache before each run
};

/// Why a measurement reached more than 100 % of the rate that memory was measured to have. Empty for up to 100 %.
/// `bytes` and `own_bytes` are a layer's. A cause is possible where memory can move, within the measured time, all that
/// the cache then does not hold. The causes, in the order in which they are tried:
///   "fits <cache>"                 all layers' own bytes fit the cache, which keeps them from run to run
///   "activations stay in <cache>"  the cache holds a kernel's activations for the next; memory moves own bytes alone
///   "<cache> may keep N % ..."     besides, the cache keeps own bytes from run to run, as many as fit
/// Where none of them is possible, the note says to doubt the probe.
std::string limit_note(double percent, double bytes, double own_bytes, const CacheUse& use);

}  // namespace cf::apps
