#include "apps/bench/host_probe.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace cf::apps {
namespace {

/// The sum of n words, compiled once for each instruction set and chosen at run time.
#ifdef __x86_64__
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
std::uint64_t
sum_words(const std::uint64_t* words, std::int64_t n) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += words[i];
  return sum;
}

}  // namespace

double stream_read_bytes_per_s(const void* data, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (address + 7) / 8 * 8, last = (address + bytes) / 8 * 8;
  const std::int64_t words = last > first ? std::int64_t(last - first) / 8 : 0;
  const auto* p = reinterpret_cast<const std::uint64_t*>(first);
  std::uint64_t sum = 0;
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel reduction(+ : sum)
  {
    const std::int64_t n = omp_get_num_threads(), t = omp_get_thread_num();
    const std::int64_t from = words * t / n, to = words * (t + 1) / n;
    sum += sum_words(p + from, to - from);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  // The sum must count as used, or the compiler may drop the reading.
  static std::atomic<std::uint64_t> sink;
  sink.store(sum, std::memory_order_relaxed);
  return double(words) * 8 / std::max(elapsed.count(), 1e-9);
}

void evict_from_caches(const void* data, std::size_t bytes) {
#ifdef __x86_64__
  constexpr std::size_t line_bytes = 64;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = address / line_bytes * line_bytes, last = address + bytes;
#pragma omp parallel for
  for (std::uintptr_t line = first; line < last; line += line_bytes) _mm_clflush(reinterpret_cast<const void*>(line));
  _mm_mfence();
#else
  // No instruction evicts a line here: push everything out with a buffer larger than the usual last-level cache.
  static std::vector<std::uint64_t> other(std::size_t(64) << 20 >> 3, 1);
  stream_read_bytes_per_s(other.data(), other.size() * 8);
  (void)data, (void)bytes;
#endif
}

}  // namespace cf::apps
