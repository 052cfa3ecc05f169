#include "core/resources.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <latch>
#include <limits>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

namespace cf {

namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// The lines of a file; none where there is no file.
std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(std::move(line));
  return lines;
}

/// Parses the number at the beginning of a text, after spaces. Without a stream's operator>>, which crashes in a
/// process that has two versions of libstdc++, as Python can.
std::optional<double> number_at(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::uint64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) return std::nullopt;
  return double(value);
}

/// The number that a file holds; no limit where it holds none, as "max", or where there is no file.
double number_in(const std::string& path) {
  const std::vector<std::string> lines = lines_of(path);
  return lines.empty() ? kNoLimit : number_at(lines.front()).value_or(kNoLimit);
}

/// The number of a line "key number"; 0 where there is none.
double number_of(const std::string& path, const std::string& key) {
  for (const std::string& line : lines_of(path))
    if (line.starts_with(key) && line.find_first_of(" \t") == key.size())
      return number_at(std::string_view(line).substr(key.size())).value_or(0);
  return 0;
}

double available(const std::string& meminfo) {
  const double kib = number_of(meminfo, "MemAvailable:");
  return kib > 0 ? kib * 1024 : double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
}

/// What the files of a memory cgroup are called.
struct CgroupFiles {
  const char *limit, *usage, *file_pages;  // file_pages: the line of memory.stat with pages that can be dropped
};

/// The least free memory of the cgroup `path` below `root` and of the cgroups that contain it. Inside a container
/// `root` may be the container's own cgroup, and `path` the one that the host knows: then there is nothing at `path`,
/// and `root` counts.
double cgroup_left(const std::string& root, std::string path, const CgroupFiles& files) {
  double left = kNoLimit;
  while (true) {
    const std::string directory = root + path + "/";
    const double limit = number_in(directory + files.limit);
    if (limit != kNoLimit) {
      const double used = number_in(directory + files.usage) - number_of(directory + "memory.stat", files.file_pages);
      left = std::min(left, std::max(0.0, limit - std::max(0.0, used)));
    }
    if (path.empty()) return left;
    path.resize(path.rfind('/'));
  }
}

double cgroups_left(const MemorySources& sources) {
  double left = kNoLimit;
  // "0::/path" in version 2, "4:memory:/path" in version 1
  for (const std::string& line : lines_of(sources.cgroups)) {
    const std::size_t controllers = line.find(':') + 1, colon = line.find(':', controllers);
    if (controllers == 0 || colon == line.npos) continue;
    const std::string which = "," + line.substr(controllers, colon - controllers) + ",";
    std::string path = line.substr(colon + 1);
    if (!path.starts_with('/')) continue;
    if (path == "/") path.clear();
    if (which == ",,")
      left = std::min(left, cgroup_left(sources.cgroup_root, path, {"memory.max", "memory.current", "inactive_file"}));
    else if (which.find(",memory,") != which.npos)
      left = std::min(left, cgroup_left(sources.cgroup_root + "/memory", path,
                                        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}));
  }
  return left;
}

double addresses_left() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  const double used = number_in("/proc/self/statm") * double(::sysconf(_SC_PAGE_SIZE));  // the first number: all pages
  return std::max(0.0, double(limit.rlim_cur) - (used == kNoLimit ? 0 : used));
}

}  // namespace

double free_memory_bytes(const MemorySources& sources) {
  return std::min({available(sources.meminfo), cgroups_left(sources), addresses_left()});
}

std::string gigabytes(double bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f GB", bytes * 1e-9);
  return text;
}

Status check_free_memory(double bytes, std::string_view needs) {
  const double free = free_memory_bytes();
  if (bytes <= free) return {};
  return Status::error(Code::out_of_memory,
                       std::string(needs) + ", expected at most the " + gigabytes(free) + " of memory that are free");
}

Status check_total_memory(double bytes, std::string_view needs) {
  const double total = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
  if (bytes <= total) return {};
  return Status::error(Code::out_of_memory,
                       std::string(needs) + ", expected at most this machine's " + gigabytes(total) + " of memory");
}

Status check_threads(std::string_view option, std::int64_t threads) {
  if (threads < 1 || threads > kMostThreads)
    return Status::error(Code::invalid_argument, std::string(option) + ": expected 1 to " +
                                                     std::to_string(kMostThreads) + ", got " + std::to_string(threads));
  std::vector<std::jthread> others;
  std::latch all_started(1);
  Status status;
  try {
    // All threads live at the same time, as those of OpenMP will.
    while (std::int64_t(others.size()) < threads - 1) others.emplace_back([&] { all_started.wait(); });
  } catch (const std::system_error& e) {
    status = Status::error(Code::out_of_memory, std::string(option) +
                                                    ": expected a number of threads that this process can start, got " +
                                                    std::to_string(threads) + "; " + std::to_string(others.size() + 1) +
                                                    " were started: " + e.code().message());
  }
  all_started.count_down();
  return status;
}

}  // namespace cf
