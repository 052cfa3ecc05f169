#include "core/resources.hpp"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <latch>
#include <system_error>
#include <thread>
#include <vector>

namespace cf {

double free_memory_bytes() {
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kib) == 1) return double(kib) * 1024;
  }
  return double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
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
