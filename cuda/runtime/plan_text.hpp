#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace cf::cuda {

/// A number of a plan, and what it counts.
struct Counted {
  std::int64_t number;
  std::string_view of;
};

/// A plan in one line: "132 blocks, 4 stages".
inline std::string plan_text(std::initializer_list<Counted> numbers) {
  std::string text;
  for (const Counted& c : numbers)
    text.append(text.empty() ? "" : ", ").append(std::to_string(c.number)).append(" ").append(c.of);
  return text;
}

}  // namespace cf::cuda
