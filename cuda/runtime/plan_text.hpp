#pragma once
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace cf::cuda {

/// The fields of a plan as a text: "elements 8, threads 320".
inline std::string plan_text(std::initializer_list<std::pair<std::string_view, long>> fields) {
  std::string text;
  for (const auto& [name, value] : fields)
    text.append(text.empty() ? "" : ", ").append(name).append(" ").append(std::to_string(value));
  return text;
}

}  // namespace cf::cuda
