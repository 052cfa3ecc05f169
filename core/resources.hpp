#pragma once
// What this machine has left for a program: memory and threads.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace cf {

/// Where Linux says how much memory is free.
struct MemorySources {
  std::string meminfo = "/proc/meminfo", cgroups = "/proc/self/cgroup", cgroup_root = "/sys/fs/cgroup";
};

/// The bytes of memory that a program can take without swapping: the least of MemAvailable (elsewhere than on Linux all
/// memory), what the process's memory cgroup and each one around it have left, in version 1 and 2, and what RLIMIT_AS
/// leaves of addresses. What a cgroup holds of files that were read once counts as free.
double free_memory_bytes(const MemorySources& sources = {});

/// "1.25 GB"
std::string gigabytes(double bytes);

/// Refuses more bytes than free_memory_bytes(). The message begins with `needs`, a sentence such as "the weights need
/// 3.20 GB", and ends with the memory that is free.
Status check_free_memory(double bytes, std::string_view needs);

/// Refuses more bytes than the machine's memory: for weights that are mapped from files and read again for each token.
Status check_total_memory(double bytes, std::string_view needs);

/// The most threads that a program is asked for.
inline constexpr std::int64_t kMostThreads = 1024;

/// Refuses more than kMostThreads, and a number of threads that this process cannot start now, the calling thread among
/// them. OpenMP does not report such a failure: it ends the process. `option` is what the message calls the number.
Status check_threads(std::string_view option, std::int64_t threads);

}  // namespace cf
