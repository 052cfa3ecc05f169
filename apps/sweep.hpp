#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"

namespace cf::apps {

/// The values that an option may take, and who says so: "pythia-2.8b has layers 0 to 31".
struct Bounds {
  std::int64_t lowest, highest;
  std::string reason;
};

/// The values of a comma list of numbers and inclusive ranges, "0-3,7" -> 0 1 2 3 7, in their order.
/// Refuses, naming `option` and the part: what is neither, a range that runs downwards, a value outside the bounds.
Result<std::vector<std::int64_t>> parse_sweep(std::string_view option, std::string_view text, const Bounds& bounds);

/// Refuses a value outside the bounds, naming `option`.
Status check_bounds(std::string_view option, std::int64_t value, const Bounds& bounds);

}  // namespace cf::apps
