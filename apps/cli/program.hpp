#pragma once
// How a program begins and ends: its name, commit and command line, its exit codes, its messages on stderr.
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/atomic_file.hpp"
#include "core/resources.hpp"
#include "core/status.hpp"

namespace cf::apps {

using cf::check_threads;
using cf::check_writable;
using cf::write_file_atomically;

/// The programs' exit codes.
inline constexpr int kOk = 0, kComparisonFailed = 1, kBadInput = 2;

/// The name that the program was called by, without its directory.
std::string program_name();

/// The commit that the program was built from, or "unknown".
std::string_view commit();

/// The processor's name, or "unknown CPU".
std::string cpu_name();

/// Prints "PROGRAM: message" as one line on stderr. Where stderr cannot be written the message is lost, and no more.
void say(std::string_view message);

/// The same; returns kBadInput.
int fail(std::string_view message);
int fail(const Status& status);

/// Prints the first note of each kind as one line on stderr, and how many more there are that say the same of others.
void print_notes(const std::vector<std::string>& notes);

/// The words of a command line, quoted where a shell needs it.
std::string shell_command(const std::vector<std::string>& words);
std::string shell_command(int argc, const char* const* argv);

/// Runs what main() does and returns its exit code. Where it throws, as where memory or threads run out, that is
/// kBadInput after one line on stderr. A standard stream that is closed is one that cannot be written, so that no file
/// takes its place.
int run_main(const std::function<int()>& body);

}  // namespace cf::apps
