// What the library asks of the machine: files that are written whole, and memory that is free.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "core/atomic_file.hpp"
#include "core/resources.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

using namespace cf;
using namespace cf::test;

namespace {

namespace fs = std::filesystem;

/// The names in a directory, sorted.
std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

mode_t mode_of(const std::string& path) {
  struct stat info {};
  REQUIRE(::stat(path.c_str(), &info) == 0);
  return info.st_mode & 07777;
}

/// Memory of 4 GiB that is available, and cgroups below a directory.
MemorySources sources_in(const TempDir& dir, const std::string& cgroups) {
  write_file(dir / "meminfo", "MemTotal:  8388608 kB\nMemFree:  1000 kB\nMemAvailable:  4194304 kB\n");
  write_file(dir / "cgroups", cgroups);
  return {.meminfo = dir / "meminfo", .cgroups = dir / "cgroups", .cgroup_root = dir / "root"};
}

void write_cgroup(const std::string& directory, const std::vector<std::pair<std::string, std::string>>& files) {
  fs::create_directories(directory);
  for (const auto& [name, text] : files) write_file(directory + "/" + name, text + "\n");
}

constexpr double kGiB = 1 << 30;

}  // namespace

TEST_CASE("a file that is written anew keeps its mode, and a new one gets the usual one", "[files]") {
  const TempDir dir;
  const mode_t before = ::umask(0022);
  REQUIRE(write_file_atomically(dir / "new", "one"));
  ::umask(before);
  CHECK(mode_of(dir / "new") == 0644);
  for (const mode_t mode : {0600, 0640, 0666, 0444}) {
    REQUIRE(::chmod((dir / "new").c_str(), mode) == 0);
    REQUIRE(write_file_atomically(dir / "new", {"two", " parts"}));
    CHECK(mode_of(dir / "new") == mode);
  }
  CHECK(read_file(dir / "new") == "two parts");
  CHECK(names_in(dir.path()) == std::vector<std::string>{"new"});
}

TEST_CASE("names of 255 bytes are written, longer ones are refused before the work", "[files]") {
  const TempDir dir;
  const std::string longest = dir / std::string(255, 'x'), longer = dir / std::string(256, 'x');
  for (int i = 0; i < 2; ++i) REQUIRE(write_file_atomically(longest, "text"));
  CHECK(read_file(longest) == "text");
  CHECK(refusal_fault(check_writable(longer), Code::io_error, {longer, "cannot be written: File name too long"}) == "");
}

TEST_CASE("a directory that is gone is refused before the work, behind a link too", "[files]") {
  const TempDir dir;
  const std::string before = fs::current_path();
  fs::create_directory(dir / "gone");
  fs::current_path(dir / "gone");
  fs::remove(dir / "gone");
  const Status status = check_writable("x.json");
  fs::current_path(before);
  CHECK(refusal_fault(status, Code::io_error, {"x.json: cannot be written: No such file or directory"}) == "");
  fs::create_symlink("gone/x.json", dir / "link");
  CHECK(refusal_fault(check_writable(dir / "link"), Code::io_error, {"link: cannot be written: No such file"}) == "");
  // A link to a file that is not there yet stays a link.
  fs::create_directory(dir / "gone");
  REQUIRE(write_file_atomically(dir / "link", "text"));
  CHECK(fs::is_symlink(dir / "link"));
  CHECK(read_file(dir / "gone/x.json") == "text");
}

TEST_CASE("temporary names that are taken are passed over", "[files]") {
  const TempDir dir;
  REQUIRE(write_file_atomically(dir / "x", "old"));
  // As a process of this number left them that was killed, in the form of today and of earlier versions.
  std::vector<std::string> left{"x"};
  for (int i = 0; i < 200; ++i)
    for (const std::string& name : {".cf-" + std::to_string(::getpid()) + "." + std::to_string(i) + ".tmp",
                                    "x.tmp" + std::to_string(::getpid()) + "." + std::to_string(i)}) {
      write_file(dir / name, "left");
      left.push_back(name);
    }
  REQUIRE(write_file_atomically(dir / "x", "new"));
  CHECK(read_file(dir / "x") == "new");
  std::sort(left.begin(), left.end());
  CHECK(names_in(dir.path()) == left);
}

TEST_CASE("a signal in the middle of a file leaves nothing", "[files]") {
  const TempDir dir;
  const std::string text(std::size_t(1) << 26, 'x');
  for (int i = 0; i < 5; ++i) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      for (int n = 0; write_file_atomically(dir / ("x" + std::to_string(n)), text); ++n) {
      }
      ::_exit(1);
    }
    ::usleep(useconds_t(3000 + 30000 * i));
    REQUIRE(::kill(child, SIGKILL) == 0);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    for (const std::string& name : names_in(dir.path())) {
      CHECK(name.starts_with("x"));
      CHECK(fs::file_size(dir / name) == text.size());
      fs::remove(dir / name);
    }
  }
}

TEST_CASE("free memory is what is available, without cgroups and with those of other controllers", "[memory]") {
  const TempDir dir;
  CHECK(free_memory_bytes(sources_in(dir, "")) == 4 * kGiB);
  CHECK(free_memory_bytes(sources_in(dir, "nonsense\n3:cpu,cpuacct:/a\n0::/a\n")) == 4 * kGiB);
  CHECK(free_memory_bytes() > 0);
}

TEST_CASE("free memory is what a cgroup of version 2 and those around it have left", "[memory]") {
  const TempDir dir;
  const std::string root = dir / "root";
  const MemorySources sources = sources_in(dir, "0::/outer/inner\n");
  write_cgroup(root + "/outer/inner",
               {{"memory.max", "max"}, {"memory.current", "1000000"}, {"memory.stat", "anon 1\ninactive_file 2"}});
  CHECK(free_memory_bytes(sources) == 4 * kGiB);
  write_cgroup(root + "/outer", {{"memory.max", "600000000"}, {"memory.current", "100000000"}});
  CHECK(free_memory_bytes(sources) == 500e6);
  // Pages of files that were read once can be dropped.
  write_cgroup(root + "/outer", {{"memory.stat", "anon 1\ninactive_file 40000000\nactive_file 7"}});
  CHECK(free_memory_bytes(sources) == 540e6);
  write_cgroup(root + "/outer/inner", {{"memory.max", "2000000"}});
  CHECK(free_memory_bytes(sources) == 1000002);
  write_cgroup(root + "/outer/inner", {{"memory.current", "3000000"}});
  CHECK(free_memory_bytes(sources) == 0);
  // A container sees its own cgroup as the root.
  const MemorySources container = sources_in(dir, "0::/\n");
  write_cgroup(root, {{"memory.max", "5000000"}, {"memory.current", "4000000"}});
  CHECK(free_memory_bytes(container) == 1e6);
}

TEST_CASE("free memory is what a cgroup of version 1 has left", "[memory]") {
  const TempDir dir;
  const std::string root = dir / "root/memory";
  const MemorySources sources = sources_in(dir, "5:cpuset:/\n4:hugetlb,memory:/docker/0123\n0::/\n");
  write_cgroup(root, {{"memory.limit_in_bytes", "9223372036854771712"}, {"memory.usage_in_bytes", "123"}});
  CHECK(free_memory_bytes(sources) == 4 * kGiB);
  // In a container the path is the host's, and the limit is the root's.
  write_cgroup(root, {{"memory.limit_in_bytes", "600000000"},
                      {"memory.usage_in_bytes", "90000000"},
                      {"memory.stat", "inactive_file 1\ntotal_inactive_file 30000000"}});
  CHECK(free_memory_bytes(sources) == 540e6);
  write_cgroup(root + "/docker/0123", {{"memory.limit_in_bytes", "100000000"}, {"memory.usage_in_bytes", "1000000"}});
  CHECK(free_memory_bytes(sources) == 99e6);
}

// AddressSanitizer takes terabytes of addresses.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("free memory is what RLIMIT_AS leaves", "[memory]") {
  rlimit saved;
  REQUIRE(::getrlimit(RLIMIT_AS, &saved) == 0);
  const rlimit small{.rlim_cur = 1 << 30, .rlim_max = saved.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_AS, &small) == 0);
  const double free = free_memory_bytes();
  const Status status = check_free_memory(kGiB, "it needs 1.07 GB");
  REQUIRE(::setrlimit(RLIMIT_AS, &saved) == 0);
  CHECK(free > 0);
  CHECK(free < kGiB);
  CHECK(refusal_fault(status, Code::out_of_memory, {"it needs 1.07 GB, expected at most the ", " that are free"}) ==
        "");
}
#endif

TEST_CASE("numbers of threads that no one means are refused at once", "[threads]") {
  for (const std::int64_t n : {0, -1, 1025, 10000})
    CHECK(refusal_fault(check_threads("--threads", n), Code::invalid_argument,
                        {"--threads: expected 1 to 1024, got " + std::to_string(n)}) == "");
}
