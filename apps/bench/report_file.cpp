#include "apps/bench/report_file.hpp"

#include <signal.h>

#include <filesystem>
#include <optional>

#include "apps/cli/interrupt.hpp"
#include "apps/cli/program.hpp"

namespace cf::apps {
Status write_report(const std::string& path, bool complete, const std::function<std::string()>& text) {
  if (path.empty()) return {};
  std::error_code none;
  const std::filesystem::file_status target = std::filesystem::status(path, none);
  const bool regular = !std::filesystem::exists(target) || std::filesystem::is_regular_file(target);
  if (!complete && !regular) return {};
  std::optional<Interrupts> hold(std::in_place);
  Status written = write_file_atomically(path, text());
  const int noted = hold->noted();
  hold.reset();
  if (noted != 0) ::raise(noted);
  return written;
}

}  // namespace cf::apps
