#pragma once
// What the programs share: messages, tables, the command line. CLI11 and fmt stay in the .cpp files.
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"
#include "golden/atomic_file.hpp"

namespace CLI {
class App;
}

namespace cf::apps {

using golden::check_writable;
using golden::write_file_atomically;

/// The programs' exit codes.
inline constexpr int kOk = 0, kComparisonFailed = 1, kBadInput = 2;

/// Prints "<program>: message" as one line on stderr; returns kBadInput.
int fail(std::string_view message);
int fail(const Status& status);

/// Prints the first note as one line on stderr, and how many more there are; nothing where there is none.
void print_notes(const std::vector<std::string>& notes);

/// The commit that the program was built from, or "unknown".
std::string_view commit();

/// The words of a command line, quoted where a shell needs it.
std::string shell_command(const std::vector<std::string>& words);
std::string shell_command(int argc, const char* const* argv);

/// Parses the command line. Returns the exit code where the program ends here: kOk after --help, kBadInput after one
/// line on stderr; nothing where it goes on.
std::optional<int> parse(CLI::App& app, int argc, const char* const* argv);

/// A markdown table with columns of even width. A column whose cells are all numbers ("-" and empty ones aside) is
/// aligned to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> headers) : headers_(std::move(headers)) {}
  /// A row of as many cells as there are headers.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  bool empty() const { return rows_.empty(); }
  void print(std::FILE* out) const;

 private:
  std::vector<std::string> headers_;
  std::vector<std::vector<std::string>> rows_;
};

/// A progress bar on stderr, where that is a terminal; nothing anywhere else. The line is cleared in the end.
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
