#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cf::cuda {

/// The launches of a call whose kernel takes some tokens at a time: each takes tokens [first, first + tokens).
template <class Plan>
struct TokenLaunches {
  struct Launch {
    std::int64_t first, tokens;
    Plan plan;
  };
  std::vector<Launch> launches;
};

/// The first launch's plan, and the last one's where it has another.
template <class Plan>
std::string to_string(const TokenLaunches<Plan>& all) {
  if (all.launches.empty()) return "no launches";
  const std::string first = to_string(all.launches.front().plan), last = to_string(all.launches.back().plan);
  if (all.launches.size() == 1) return first;
  return std::to_string(all.launches.size()) + " launches: " + first + (last == first ? "" : "; the last: " + last);
}

}  // namespace cf::cuda
