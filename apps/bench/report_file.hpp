#pragma once
#include <functional>
#include <string>

#include "core/status.hpp"

namespace cf::apps {

/// Writes what `text` returns as the whole file. A program calls this after each measurement, so that the file holds
/// what is done, and once more with `complete` at its end. An interrupt (SIGINT, SIGTERM, SIGHUP) during the call takes
/// effect after it. A file that exists and is no regular file, such as a pipe, cannot be written anew: it is written
/// once, with `complete`. Without a path nothing is written.
Status write_report(const std::string& path, bool complete, const std::function<std::string()>& text);

}  // namespace cf::apps
