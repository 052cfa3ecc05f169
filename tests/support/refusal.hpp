#pragma once
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace cf::test {

/// "" if the status has this code and its message is one line that contains every part; otherwise what is wrong.
inline std::string refusal_fault(const Status& status, Code code, std::initializer_list<std::string_view> parts) {
  if (status) return "was accepted";
  const std::string& message = status.message();
  if (status.code() != code) return "code " + std::string(to_string(status.code())) + ": " + message;
  for (char c : message)
    if (c >= 0 && c < ' ') return "is not one printable line: " + message;
  for (std::string_view part : parts)
    if (message.find(part) == message.npos) return "lacks \"" + std::string(part) + "\": " + message;
  return "";
}

}  // namespace cf::test
