#pragma once
// What a program shows on a terminal and leaves out of a file or a pipe: colour and progress.
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace cf::apps {

/// The word of a failed comparison.
inline constexpr std::string_view kFail = "FAIL";

/// The text in red, where `out` is a terminal and the environment variable NO_COLOR is not set or empty; else the text.
std::string in_colour(std::string_view text, std::FILE* out);

/// Text of a file as part of a line: control characters are escaped, so that none reaches a terminal.
std::string visible(std::string_view text);

/// "label [#####.........]  37%" in at most `columns` columns. Where they are few, the bar becomes shorter, then the
/// label loses its beginning, then the bar and the label are left out.
std::string progress_line(std::string_view label, int percent, std::size_t columns);

/// A progress bar on stderr, which fits the terminal's width at any time. The line is cleared in the end. Where stderr
/// is no terminal, nothing is printed.
class Progress {
 public:
  Progress(std::string label, std::int64_t total);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();
  void set(std::int64_t done);

 private:
  std::string label_;
  std::int64_t total_;
  int percent_ = -1;
  bool shown_;
};

}  // namespace cf::apps
