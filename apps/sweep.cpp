#include "apps/sweep.hpp"

#include <charconv>
#include <optional>

namespace cf::apps {
namespace {

Status refuse(std::string_view option, std::string_view value, const std::string& why) {
  return Status::error(Code::invalid_argument, std::string(option) + " " + std::string(value) + ": " + why);
}

/// A number without sign, whole; nothing for any other text or one beyond 64 bits.
std::optional<std::int64_t> number(std::string_view text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.front() == '-') return std::nullopt;
  return value;
}

}  // namespace

Status check_bounds(std::string_view option, std::int64_t value, const Bounds& bounds) {
  if (value >= bounds.lowest && value <= bounds.highest) return {};
  return refuse(option, std::to_string(value), bounds.reason);
}

Result<std::vector<std::int64_t>> parse_sweep(std::string_view option, std::string_view text, const Bounds& bounds) {
  std::vector<std::int64_t> values;
  for (std::size_t from = 0; from <= text.size();) {
    const std::size_t comma = std::min(text.find(',', from), text.size());
    const std::string_view part = text.substr(from, comma - from);
    from = comma + 1;
    const std::size_t dash = part.find('-');
    const auto first = number(part.substr(0, dash));
    const auto last = dash == part.npos ? first : number(part.substr(dash + 1));
    if (!first || !last)
      return refuse(option, "'" + std::string(text) + "'",
                    "expected numbers and ranges such as 0-3,7, got '" + std::string(part) + "'");
    if (*first > *last)
      return refuse(
          option, part,
          "expected a range that runs upwards, got " + std::to_string(*first) + " to " + std::to_string(*last));
    // The bounds first: they are what keeps a range's length sane.
    CF_TRY(check_bounds(option, *first, bounds));
    CF_TRY(check_bounds(option, *last, bounds));
    for (std::int64_t v = *first; v <= *last; ++v) values.push_back(v);
  }
  return values;
}

}  // namespace cf::apps
