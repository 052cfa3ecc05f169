#pragma once
#include <cstddef>

namespace cf::apps {

/// Reads the buffer once with all OpenMP threads, each its own contiguous part, and returns bytes per second: the rate
/// that no decode step over the same weights can beat.
double stream_read_bytes_per_s(const void* data, std::size_t bytes);

/// The rate of streaming reads of several buffers, one after the other.
class ReadRate {
 public:
  void add(const void* data, std::size_t bytes) {
    bytes_ += double(bytes);
    seconds_ += double(bytes) / stream_read_bytes_per_s(data, bytes);
  }
  double bytes_per_s() const { return bytes_ / seconds_; }

 private:
  double bytes_ = 0, seconds_ = 0;
};

/// Removes the buffer from the processor's caches, so that the next reader finds it in memory.
void evict_from_caches(const void* data, std::size_t bytes);

}  // namespace cf::apps
