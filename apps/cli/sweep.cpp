#include "apps/cli/sweep.hpp"

#include <algorithm>
#include <optional>

namespace cf::apps {

Result<std::vector<std::int64_t>> parse_sweep(std::string_view option, std::string_view text, const Range& range) {
  const auto refuse = [&](std::string_view expected, std::string_view got) {
    Faults faults;
    faults.expected(option, expected, got);
    return Status::error(Code::invalid_argument, faults.line());
  };
  const auto number = [](std::string_view part) {
    return part.starts_with("-") ? std::nullopt : parse_integer<std::int64_t>(part);
  };
  std::vector<std::int64_t> values;
  for (std::size_t from = 0; from <= text.size();) {
    const std::size_t comma = std::min(text.find(',', from), text.size());
    const std::string_view part = text.substr(from, comma - from);
    from = comma + 1;
    const std::size_t dash = part.find('-');
    const auto first = number(part.substr(0, dash));
    const auto last = dash == part.npos ? first : number(part.substr(dash + 1));
    if (!first || !last) return refuse("numbers and ranges such as 0-3,7", text);
    if (*first > *last) return refuse("a range that runs upwards", part);
    // Checked before the range is expanded: the bounds keep it short.
    if (!range.holds(*first) || !range.holds(*last)) return refuse(range.text(), part);
    for (std::int64_t v = *first; v <= *last; ++v) values.push_back(v);
  }
  return values;
}

}  // namespace cf::apps
