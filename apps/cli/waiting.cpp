#include "apps/cli/waiting.hpp"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace cf::apps {

void let_waiting_threads_sleep() {
  // OpenMP's own variable, GCC's and LLVM's.
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
    if (std::getenv(name)) return;
  std::vector<std::string> words;
  std::ifstream command("/proc/self/cmdline");
  for (std::string word; std::getline(command, word, '\0');) words.push_back(word);
  if (words.empty()) return;
  // A thousand spins are a few microseconds, as long as the gaps between a small model's ops. LLVM counts milliseconds.
  if (::setenv("GOMP_SPINCOUNT", "1000", 1) != 0 || ::setenv("KMP_BLOCKTIME", "0", 1) != 0) return;
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv("/proc/self/exe", argv.data());
}

}  // namespace cf::apps
