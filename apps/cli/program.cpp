#include "apps/cli/program.hpp"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <fstream>

#include <algorithm>
#include <cstdio>
#include <map>
#include <new>
#include <set>
#include <system_error>

#include "apps/cli/waiting.hpp"

namespace cf::apps {

void say(std::string_view message) {
  std::string line(message.substr(0, message.find_last_not_of("\n ") + 1));
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' '; }, ' ');
  // Unlike fmt::print, fputs does not throw where the stream cannot be written.
  std::fputs(fmt::format("{}: {}\n", program_name(), line).c_str(), stderr);
}

std::string program_name() { return program_invocation_short_name; }

std::string_view commit() { return CF_COMMIT; }

int fail(std::string_view message) {
  say(message);
  return kBadInput;
}

int fail(const Status& status) { return fail(status.message()); }

void print_notes(const std::vector<std::string>& notes) {
  // Without what they quote, such as a tensor's name, notes of one kind are equal.
  const auto kind_of = [](const std::string& note) {
    std::string kind;
    bool quoted = false;
    for (char c : note) {
      if (c == '\'')
        quoted = !quoted;
      else if (!quoted)
        kind += c;
    }
    return kind;
  };
  std::map<std::string, std::set<std::string>> kinds;
  for (const std::string& note : notes) kinds[kind_of(note)].insert(note);
  for (const std::string& note : notes) {
    const auto kind = kinds.extract(kind_of(note));
    if (kind.empty()) continue;  // its first one was printed
    const std::size_t more = kind.mapped().size() - 1;
    say("note: " + note + (more > 0 ? fmt::format(" (and {} more like it)", more) : ""));
  }
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

/// Gives the main thread's stack the pages that products of matrices take of it. A stack that has to grow where the
/// process's memory has ended is a segmentation fault; at the start there is memory.
[[gnu::noinline]] static void grow_stack() {
  constexpr std::size_t page = 4096;
  volatile char pages[std::size_t(512) << 10];
  for (std::size_t i = 0; i < sizeof pages; i += page) pages[i] = 0;
}

int run_main(const std::function<int()>& body) {
  grow_stack();
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) == -1 && ::open("/dev/null", O_RDONLY) != stream) return kBadInput;
  let_waiting_threads_sleep();
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail("not enough memory");
  } catch (const std::system_error& e) {
    return fail(fmt::format("the system refused a resource: {}", e.code().message()));
  } catch (const std::exception& e) {
    return fail(e.what());
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
