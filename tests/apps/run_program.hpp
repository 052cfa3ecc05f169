#pragma once
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "tests/support/temp_dir.hpp"

namespace cf::test {

/// How a program ended and what it wrote.
struct ProgramRun {
  int exit_code;  // -1 where a signal ended it
  std::string out, err;
  /// How many lines stderr has.
  std::ptrdiff_t error_lines() const { return std::count(err.begin(), err.end(), '\n'); }
};

/// The exit code that waitpid() or system() reports; -1 where a signal ended the process.
inline int exit_code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

/// Runs a command line in a shell. `out` and `err` lack what the command itself redirects.
inline ProgramRun run_program(const std::string& command) {
  const TempDir dir;
  const int status = std::system(("{ " + command + "; } >'" + (dir / "out") + "' 2>'" + (dir / "err") + "'").c_str());
  return {exit_code_of(status), read_file(dir / "out"), read_file(dir / "err")};
}

/// Runs a command line in a shell on a terminal of that many columns; `out` holds all that the terminal got.
inline ProgramRun run_on_terminal(const std::string& command, unsigned short columns) {
  const winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (child < 0) throw std::runtime_error("no terminal");
  if (child == 0) {
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    ::_exit(127);
  }
  ProgramRun run{-1, "", ""};
  char buffer[4096];
  // The read fails when the child has closed the terminal.
  for (ssize_t n; (n = ::read(terminal, buffer, sizeof buffer)) > 0;) run.out.append(buffer, std::size_t(n));
  ::close(terminal);
  int status = 0;
  if (::waitpid(child, &status, 0) == child) run.exit_code = exit_code_of(status);
  return run;
}

}  // namespace cf::test
