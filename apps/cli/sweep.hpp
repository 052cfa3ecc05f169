#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "apps/cli/options.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// The values of a comma list of numbers and inclusive ranges, "0-3,7" -> 0 1 2 3 7, in their order.
/// Refuses, naming `option` and the part: text of another form, a range that runs downwards, a value outside `range`.
Result<std::vector<std::int64_t>> parse_sweep(std::string_view option, std::string_view text, const Range& range);

}  // namespace cf::apps
