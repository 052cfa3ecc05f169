#pragma once
// What this machine has left for a program: memory and threads.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace cf {

/// The bytes of memory that a program can take without swapping: Linux's MemAvailable, elsewhere all memory.
double free_memory_bytes();

/// "1.25 GB"
std::string gigabytes(double bytes);

/// Refuses more bytes than free_memory_bytes(). The message begins with `needs`, a sentence such as "the weights need
/// 3.20 GB", and ends with the memory that is free.
Status check_free_memory(double bytes, std::string_view needs);

/// Refuses more bytes than the machine has memory: what is mapped from files and read again for each token.
Status check_total_memory(double bytes, std::string_view needs);

/// Refuses a number of threads that this process cannot start now, the calling thread among them. OpenMP does not
/// report such a failure: it ends the process. `option` is what the message calls the number.
Status check_threads(std::string_view option, std::int64_t threads);

}  // namespace cf
