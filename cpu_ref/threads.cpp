#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <string>

#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"

namespace cf::cpu_ref {
namespace {

/// Eigen keeps up to 128 KiB of each factor of a product on the stack.
constexpr std::size_t kLeastStackBytes = std::size_t(512) << 10;

/// The stack of the calling thread, which is none that the system started the process with.
std::size_t stack_bytes() {
  pthread_attr_t attributes;
  if (::pthread_getattr_np(::pthread_self(), &attributes) != 0) return kLeastStackBytes;
  std::size_t bytes = kLeastStackBytes;
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  return bytes;
}

}  // namespace

Status start_threads(std::string_view option, std::int64_t threads) {
  CF_TRY(check_threads(option, threads));
  omp_set_num_threads(int(threads));
  std::size_t least = kLeastStackBytes;
#pragma omp parallel reduction(min : least)
  if (omp_get_thread_num() > 0) least = std::min(least, stack_bytes());
  if (least == kLeastStackBytes) return {};
  return Status::error(Code::invalid_argument, "OMP_STACKSIZE: expected stacks of at least " +
                                                   std::to_string(kLeastStackBytes >> 10) +
                                                   " KiB for each thread, got " + std::to_string(least >> 10));
}

}  // namespace cf::cpu_ref
