#pragma once
// Work on device memory between the runs of an op, on the op's stream, so that a thousand runs need no copy to the
// host.
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace cf::test {

/// A block of device memory and one of the same size to copy from or compare with.
struct BytePair {
  std::byte* data;
  const std::byte* other;
  std::size_t bytes;
};

/// data = other for each of `count` pairs, which lie on the device. The kernel allows its successor to start at once
/// and then takes its time: one that reads or writes `data` without waiting for its predecessor is found out.
void restore_late(const BytePair* pairs, int count, CUstream_st* stream);

/// Adds to *different the number of bytes of data that are not other's, then makes all of them 0xff: NaN in every
/// floating-point dtype, -1 in int32.
void count_differences_and_scrub(const BytePair* pairs, int count, std::uint64_t* different, CUstream_st* stream);

}  // namespace cf::test
