#include "apps/bench/report_file.hpp"

#include <signal.h>

#include <array>
#include <filesystem>

#include "apps/cli/program.hpp"

namespace cf::apps {
namespace {

/// Holds interrupts back until it is destroyed, then raises the last one.
class HoldInterrupts {
 public:
  HoldInterrupts() {
    struct sigaction note {};
    note.sa_handler = [](int signal) { noted = signal; };
    noted = 0;
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &note, &before_[i]);
  }
  HoldInterrupts(const HoldInterrupts&) = delete;
  HoldInterrupts& operator=(const HoldInterrupts&) = delete;
  ~HoldInterrupts() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
    if (noted != 0) ::raise(noted);
  }

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM};
  static inline volatile sig_atomic_t noted = 0;
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace

Status write_report(const std::string& path, bool complete, const std::function<std::string()>& text) {
  if (path.empty()) return {};
  std::error_code none;
  const std::filesystem::file_status target = std::filesystem::status(path, none);
  const bool regular = !std::filesystem::exists(target) || std::filesystem::is_regular_file(target);
  if (!complete && !regular) return {};
  const HoldInterrupts hold;
  return write_file_atomically(path, text());
}

}  // namespace cf::apps
