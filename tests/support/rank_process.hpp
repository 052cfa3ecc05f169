#pragma once
// Ranks of processes of their own, for tests. The processes are the test's own program again: each runs a hidden case,
// and finds its rank in the variables that torchrun sets.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "core/ranks/group.hpp"
#include "tests/support/catch.hpp"

namespace cf::test {

/// Sends what a rank's process says to the process that started it: the last line.
inline void say_last(const std::string& line) {
  const char* const to = std::getenv("CF_TEST_SAY");
  if (!to) return;
  const std::string text = line + "\n";
  REQUIRE(::write(std::atoi(to), text.data(), text.size()) == ssize_t(text.size()));
}

/// What a rank does, here or in a process of its own.
inline void require_done(const Status& s) {
  say_last(s.message());
  INFO(s.message());
  REQUIRE(s);
}

inline std::shared_ptr<RankGroup> join_as_torchrun_says(RankGroup::Options options = {}) {
  const auto environment = rank_environment();
  require_done(environment.status());
  auto group = RankGroup::join(*environment, options);
  require_done(group.status());
  return *std::move(group);
}

/// Another process of this program, which runs one hidden case as that rank.
class RankProcess {
 public:
  RankProcess(const std::string& test, std::int64_t rank, std::int64_t ranks, int port) {
    int pipe[2];
    REQUIRE(::pipe(pipe) == 0);
    char self[4096] = {};
    REQUIRE(::readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    process_ = ::fork();
    REQUIRE(process_ >= 0);
    if (process_ == 0) {
      (void)::close(pipe[0]);
      for (const auto& [name, value] : {std::pair{"RANK", std::to_string(rank)},
                                        {"WORLD_SIZE", std::to_string(ranks)},
                                        {"MASTER_ADDR", std::string("127.0.0.1")},
                                        {"MASTER_PORT", std::to_string(port)},
                                        {"CF_TEST_SAY", std::to_string(pipe[1])}})
        (void)::setenv(name, value.c_str(), 1);
      (void)::execl(self, self, test.c_str(), "--out", "/dev/null", static_cast<char*>(nullptr));
      ::_exit(127);
    }
    (void)::close(pipe[1]);
    from_ = pipe[0];
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  ~RankProcess() {
    if (process_ > 0) (void)wait();
    (void)::close(from_);
  }

  /// How the process ended, as waitpid() says.
  int wait() {
    for (char text[256]; true;) {
      const ssize_t n = ::read(from_, text, sizeof text);
      if (n <= 0) break;
      said_.append(text, std::size_t(n));
    }
    int status = -1;
    (void)::waitpid(process_, &status, 0);
    process_ = -1;
    return status;
  }
  /// The last line that it has said.
  std::string last_line() const {
    const std::string text = said_.substr(0, said_.find_last_not_of('\n') + 1);
    return text.substr(text.rfind('\n') + 1);
  }

 private:
  pid_t process_ = -1;
  int from_ = -1;
  std::string said_;
};

inline Result<std::shared_ptr<RankGroup>> join_here(std::int64_t rank, std::int64_t ranks, int port) {
  CF_TRY_ASSIGN(std::unique_ptr<RankGroup> group,
                RankGroup::join({.rank = rank, .ranks = ranks, .host = "127.0.0.1", .port = port}, {}));
  return std::shared_ptr<RankGroup>(std::move(group));
}

}  // namespace cf::test
