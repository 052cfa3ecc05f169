#include "apps/bench/timing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/cli/statistics.hpp"

namespace cf::apps {
Spread spread(std::vector<double> series) {
  std::sort(series.begin(), series.end());
  return {percentile(series, 0.5), percentile(series, 0.1), percentile(series, 0.99)};
}

std::string limit_note(double percent, double bytes, double own_bytes, const CacheUse& use) {
  if (percent <= 100) return "";
  const double run_bytes = own_bytes * use.layers, kept_bytes = use.evicts_weights ? 0 : use.cache_bytes;
  if (run_bytes <= kept_bytes) return fmt::format("fits {}", use.name);
  // Whether the figure would be at most 100 % if memory moved only `memory_bytes` in a run.
  const auto explained_by = [&](double memory_bytes) { return percent * memory_bytes <= 100 * bytes * use.layers; };
  const double activations_beyond = std::max(bytes - own_bytes - use.cache_bytes, 0.0) * use.layers;
  if (activations_beyond == 0 && explained_by(run_bytes)) return fmt::format("activations stay in {}", use.name);
  if (explained_by(run_bytes - kept_bytes + activations_beyond))
    return fmt::format("{} may keep {:.0f} % from run to run", use.name, std::ceil(100 * kept_bytes / run_bytes));
  return "above the probe: doubt the probe";
}

}  // namespace cf::apps
