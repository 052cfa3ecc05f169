#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"

namespace cf::cpu_ref {
namespace {

/// Eigen keeps up to 128 KiB of each factor of a product on the stack.
constexpr std::size_t kLeastStackBytes = std::size_t(512) << 10;

/// The bytes of the calling thread's stack. The thread is not the process's first one.
std::size_t stack_bytes() {
  pthread_attr_t attributes;
  if (::pthread_getattr_np(::pthread_self(), &attributes) != 0) return kLeastStackBytes;
  std::size_t bytes = kLeastStackBytes;
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  return bytes;
}

/// The bytes that a text such as "16K", "2 M" or "1048576B" asks for, without a unit in KiB; none for another text.
std::optional<std::size_t> bytes_of(std::string_view text) {
  const auto skip_spaces = [&] { text.remove_prefix(std::min(text.find_first_not_of(' '), text.size())); };
  skip_spaces();
  std::size_t size = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  if (error != std::errc() || size > std::size_t(1) << 30) return std::nullopt;
  text.remove_prefix(std::size_t(end - text.data()));
  skip_spaces();
  switch (text.empty() ? 'k' : text.front() | 32) {  // in lower case
    case 'b': return size;
    case 'k': return size << 10;
    case 'm': return size << 20;
    case 'g': return size << 30;
    default: return std::nullopt;
  }
}

Status too_small(std::string_view name, std::size_t bytes) {
  return Status::error(Code::invalid_argument, std::string(name) + ": expected stacks of at least " +
                                                   std::to_string(kLeastStackBytes >> 10) +
                                                   " KiB for each thread, got " + std::to_string(bytes >> 10));
}

/// Refuses a stack that the environment asks for and that is too small. OpenMP ends the process where a thread cannot
/// start with its stack, so this is asked before there is one.
Status check_asked_stack() {
  for (const char* name : {"OMP_STACKSIZE", "GOMP_STACKSIZE"})
    if (const char* const text = std::getenv(name)) {
      const std::optional<std::size_t> bytes = bytes_of(text);
      return bytes && *bytes < kLeastStackBytes ? too_small(name, *bytes) : Status();
    }
  return {};
}

}  // namespace

Status start_threads(std::string_view option, std::int64_t threads) {
  CF_TRY(check_threads(option, threads));
  CF_TRY(check_asked_stack());
  omp_set_num_threads(int(threads));
  std::size_t least = kLeastStackBytes;
#pragma omp parallel reduction(min : least)
  if (omp_get_thread_num() > 0) least = std::min(least, stack_bytes());
  return least == kLeastStackBytes ? Status() : too_small("OMP_STACKSIZE", least);
}

}  // namespace cf::cpu_ref
