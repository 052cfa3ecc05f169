#include "apps/cli/terminal.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace cf::apps {
namespace {

/// The width of the terminal that stderr is; 80 where it does not tell.
std::size_t terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

/// The last `bytes` bytes of the text, or fewer: no UTF-8 character is cut.
std::string_view tail(std::string_view text, std::size_t bytes) {
  text.remove_prefix(text.size() - std::min(bytes, text.size()));
  while (!text.empty() && (static_cast<unsigned char>(text.front()) & 0xc0) == 0x80) text.remove_prefix(1);
  return text;
}

}  // namespace

std::string in_colour(std::string_view text, std::FILE* out) {
  const char* const no_color = std::getenv("NO_COLOR");
  if (::isatty(::fileno(out)) != 1 || (no_color && *no_color)) return std::string(text);
  return fmt::format("\x1b[31m{}\x1b[0m", text);
}

std::string visible(std::string_view text) {
  std::string shown;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if (byte == 0xc2 && next >= 0x80 && next < 0xa0)  // U+0080 to U+009f: some terminals obey these, too
      shown += fmt::format("\\x{:02x}\\x{:02x}", byte, static_cast<unsigned char>(text[++i]));
    else if (byte < 0x20 || byte == 0x7f)
      shown += fmt::format("\\x{:02x}", byte);
    else
      shown += text[i];
  }
  return shown;
}

std::string progress_line(std::string_view label, int percent, std::size_t columns) {
  constexpr std::size_t longest_bar = 30, shortest_bar = 10, shortest_label = 8, around = 8;  // " []" and " 100%"
  const std::string number = fmt::format("{:3d}%", percent);
  if (columns < shortest_label + shortest_bar + around) return columns < number.size() ? "" : number;
  const std::size_t room = columns - around;
  const std::size_t bar = std::clamp(room - std::min(room, label.size()), shortest_bar, longest_bar);
  const std::string name =
      label.size() + bar <= room ? std::string(label) : fmt::format("...{}", tail(label, room - bar - 3));
  const std::size_t filled = std::size_t(percent) * bar / 100;
  return fmt::format("{} [{:#>{}}{:.>{}}] {}", name, "", filled, "", bar - filled, number);
}

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(std::max<std::int64_t>(total, 1)), shown_(::isatty(STDERR_FILENO) == 1) {
  set(0);
}

Progress::~Progress() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void Progress::set(std::int64_t done) {
  const int percent = int(100 * std::min(done, total_) / total_);
  if (!shown_ || percent == percent_) return;
  percent_ = percent;
  // A character in the last column makes some terminals begin a new line.
  const std::string line = progress_line(label_, percent, terminal_columns() - 1);
  std::fputs(("\r\x1b[K" + line).c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace cf::apps
