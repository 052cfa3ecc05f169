#pragma once
#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>

namespace cf::test {

/// What JSON and the readers of it stumble over.
inline constexpr std::string_view kJsonTokens[] = {"{",
                                                   "}",
                                                   "[",
                                                   "]",
                                                   ",",
                                                   ":",
                                                   "\"",
                                                   "\\",
                                                   "0",
                                                   "-",
                                                   "1e999",
                                                   "-1",
                                                   "8",
                                                   "9223372036854775807",
                                                   "9223372036854775808",
                                                   "18446744073709551616",
                                                   "0.25",
                                                   "null",
                                                   "true",
                                                   "[[[[",
                                                   "{\"a\":",
                                                   "\"F16\"",
                                                   "\"U8\"",
                                                   "\"dtype\"",
                                                   "\"shape\"",
                                                   "\"data_offsets\"",
                                                   "\"__metadata__\"",
                                                   "\"rope_type\"",
                                                   "\"gelu_new\"",
                                                   "\xff",
                                                   "\xc3\xa9",
                                                   "\\u0000"};

/// Damages text in the ways that find a parser's faults; `tokens` are what it inserts. The same seed damages alike on
/// every machine.
class Mutator {
 public:
  explicit Mutator(std::uint64_t seed, std::span<const std::string_view> tokens = kJsonTokens)
      : random_(seed), tokens_(tokens) {}

  std::string mutate(std::string text) {
    for (std::size_t times = 1 + below(3); times-- > 0;) mutate_once(text);
    return text;
  }
  std::size_t below(std::size_t n) { return std::size_t(random_() % n); }

 private:
  void mutate_once(std::string& text) {
    const std::size_t at = below(text.size() + 1), length = 1 + below(12);
    switch (below(7)) {
      case 0:
        if (at < text.size()) text[at] = char(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < text.size()) text[at] = char(below(256));
        break;
      case 2: text.erase(at, length); break;
      case 3: text.insert(below(text.size() + 1), text.substr(at, length)); break;
      case 4: text.insert(at, tokens_[below(tokens_.size())]); break;
      case 5: replace_number(text, at); break;
      case 6: text.resize(at); break;
    }
  }
  void replace_number(std::string& text, std::size_t at) {
    constexpr std::string_view digits = "0123456789";
    const std::size_t begin = text.find_first_of(digits, at);
    if (begin == text.npos) return;
    const std::size_t end = std::min(text.find_first_not_of(digits, begin), text.size());
    const std::string values[] = {"0", "1", "2", "4294967296", "9223372036854775807", std::to_string(below(100))};
    text.replace(begin, end - begin, values[below(std::size(values))]);
  }

  std::mt19937_64 random_;
  std::span<const std::string_view> tokens_;
};

}  // namespace cf::test
