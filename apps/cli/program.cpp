#include "apps/cli/program.hpp"

#include <errno.h>
#include <fmt/format.h>
#include <fstream>

#include <algorithm>
#include <cstdio>
#include <new>
#include <system_error>

#include "apps/cli/waiting.hpp"

namespace cf::apps {
namespace {

/// Prints "PROGRAM: message" as one line on stderr.
void print_line(std::string_view message) {
  std::string line(message.substr(0, message.find_last_not_of("\n ") + 1));
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' '; }, ' ');
  // Unlike fmt::print, fputs does not throw where the stream cannot be written.
  std::fputs(fmt::format("{}: {}\n", program_name(), line).c_str(), stderr);
}

}  // namespace

std::string program_name() { return program_invocation_short_name; }

std::string_view commit() { return CF_COMMIT; }

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

int run_main(const std::function<int()>& body) {
  let_waiting_threads_sleep();
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail("not enough memory");
  } catch (const std::system_error& e) {
    return fail(fmt::format("the system refused a resource: {}", e.code().message()));
  }
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name"))
      if (const std::size_t colon = line.find(": "); colon != line.npos) return line.substr(colon + 2);
  return "unknown CPU";
}

}  // namespace cf::apps
