#pragma once
// Private to the checkpoint and golden libraries: texts of files as parts of one-line messages.
#include <string>
#include <string_view>

namespace cf::checkpoint {

/// Text of a file as part of a one-line message: other characters than printable ASCII are escaped, and what goes
/// beyond 160 characters is cut.
inline std::string printable(std::string_view text) {
  constexpr std::size_t most = 160;
  constexpr char hex[] = "0123456789abcdef";
  std::string s;
  for (char c : text.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f)
      s += c;
    else
      (s += "\\x") += {hex[byte >> 4], hex[byte & 15]};
  }
  return text.size() > most ? s + "..." : s;
}

inline std::string quote(std::string_view name) { return "'" + printable(name) + "'"; }

}  // namespace cf::checkpoint
