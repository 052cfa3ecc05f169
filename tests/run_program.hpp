#pragma once
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/temp_dir.hpp"

namespace cf::test {

/// How a program ended and what it wrote.
struct ProgramRun {
  int exit_code;  // -1 where a signal ended it
  std::string out, err;
  /// How many lines stderr has.
  std::ptrdiff_t error_lines() const { return std::count(err.begin(), err.end(), '\n'); }
};

/// Runs a command line in a shell. What the command itself redirects is not seen here.
inline ProgramRun run_program(const std::string& command) {
  const TempDir dir;
  const auto text = [&](const char* name) {
    std::ifstream file(dir / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const int status = std::system(("{ " + command + "; } >'" + (dir / "out") + "' 2>'" + (dir / "err") + "'").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text("out"), text("err")};
}

}  // namespace cf::test
