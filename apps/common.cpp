#include "apps/common.hpp"

#include <errno.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>

namespace cf::apps {
namespace {

bool is_number(const std::string& cell) {
  char* end = nullptr;
  std::strtod(cell.c_str(), &end);
  return end != cell.c_str() && (*end == '\0' || std::string_view(end) == "%");
}

/// Unlike fmt::print it does not throw where the stream cannot be written.
void put(std::FILE* out, const std::string& text) { std::fputs(text.c_str(), out); }

/// "<program>: message" as one line on stderr.
void print_line(std::string_view message) {
  std::string line(message.substr(0, message.find_last_not_of("\n ") + 1));
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' '; }, ' ');
  put(stderr, fmt::format("{}: {}\n", program_invocation_short_name, line));
}

}  // namespace

int fail(std::string_view message) {
  print_line(message);
  return kBadInput;
}

int fail(const Status& status) { return fail(status.message()); }

void print_notes(const std::vector<std::string>& notes) {
  if (notes.empty()) return;
  const std::string more = notes.size() > 1 ? fmt::format(" (and {} more like it)", notes.size() - 1) : "";
  print_line("note: " + notes.front() + more);
}

std::string_view commit() { return CF_COMMIT; }

std::string shell_command(const std::vector<std::string>& words) {
  constexpr std::string_view plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  std::string line;
  for (const std::string& word : words) {
    if (!line.empty()) line += ' ';
    if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) {
      line += word;
      continue;
    }
    line += '\'';
    for (char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += '\'';
  }
  return line;
}

std::string shell_command(int argc, const char* const* argv) {
  return shell_command(std::vector<std::string>(argv, argv + argc));
}

std::optional<int> parse(CLI::App& app, int argc, const char* const* argv) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    // Success is what --help and --version throw.
    if (e.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(e);
    return fail(e.what());
  }
}

void Table::print(std::FILE* out) const {
  std::string header = "|", rule = "|", body;
  std::vector<std::size_t> widths;
  std::vector<bool> numeric;
  for (std::size_t c = 0; c < headers_.size(); ++c) {
    std::size_t width = std::max<std::size_t>(headers_[c].size(), 3);
    bool numbers = !rows_.empty();
    for (const auto& row : rows_) {
      width = std::max(width, row[c].size());
      numbers = numbers && (row[c].empty() || row[c] == "-" || is_number(row[c]));
    }
    widths.push_back(width);
    numeric.push_back(numbers);
  }
  const auto cell = [&](const std::string& text, std::size_t c) {
    return numeric[c] ? fmt::format(" {:>{}} |", text, widths[c]) : fmt::format(" {:<{}} |", text, widths[c]);
  };
  for (std::size_t c = 0; c < headers_.size(); ++c) {
    header += cell(headers_[c], c);
    rule += numeric[c] ? fmt::format(" {:->{}}: |", "", widths[c] - 1) : fmt::format(" {:->{}} |", "", widths[c]);
  }
  for (const auto& row : rows_) {
    body += '|';
    for (std::size_t c = 0; c < headers_.size(); ++c) body += cell(row[c], c);
    body += '\n';
  }
  put(out, header + '\n' + rule + '\n' + body);
}

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(std::max<std::int64_t>(total, 1)), shown_(::isatty(STDERR_FILENO) == 1) {
  set(0);
}

Progress::~Progress() {
  if (shown_) put(stderr, "\r\x1b[K");
}

void Progress::set(std::int64_t done) {
  const int percent = int(100 * std::min(done, total_) / total_);
  if (!shown_ || percent == percent_) return;
  percent_ = percent;
  constexpr int width = 30;
  const int filled = percent * width / 100;
  put(stderr, fmt::format("\r\x1b[K{} [{:#>{}}{:.>{}}] {:3d}%", label_, "", filled, "", width - filled, percent));
  std::fflush(stderr);
}

}  // namespace cf::apps
