#include "apps/bench/device_probe.hpp"

namespace cf::apps {
namespace {

constexpr int kThreads = 256, kLoadsInFlight = 4;

__global__ void random_fill_kernel(uint4* data, long vectors) {
  const long stride = long(gridDim.x) * kThreads;
  for (long i = long(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += stride) {
    // xorshift32 of the index.
    unsigned word = unsigned(i) * 2654435761u + 1;
    const auto next = [&] {
      word ^= word << 13;
      word ^= word >> 17;
      return word ^= word << 5;
    };
    const unsigned x = next(), y = next(), z = next(), w = next();
    data[i] = make_uint4(x, y, z, w);
  }
}

/// The thread's first vector of its block's part, which is kThreads * kLoadsInFlight vectors long.
__device__ long first_vector() { return long(blockIdx.x) * kThreads * kLoadsInFlight + threadIdx.x; }

/// Loads the thread's vectors, all of them in flight together; those behind the end are zeros.
__device__ void load_part(const uint4* data, long first, long vectors, uint4 (&v)[kLoadsInFlight]) {
#pragma unroll
  for (int u = 0; u < kLoadsInFlight; ++u)
    v[u] = first + u * kThreads < vectors ? data[first + u * kThreads] : make_uint4(0, 0, 0, 0);
}

/// Each block reads one part. A grid of resident blocks that loop over the data is a little slower.
__global__ void __launch_bounds__(kThreads) stream_read_kernel(const uint4* data, long vectors, unsigned* sink) {
  uint4 v[kLoadsInFlight];
  load_part(data, first_vector(), vectors, v);
  unsigned sum = 0;
#pragma unroll
  for (int u = 0; u < kLoadsInFlight; ++u) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  // The compiler cannot rule this store out, and so keeps the loads.
  if (sum == 0x5eed) *sink = sum;
}

/// Each block copies one part.
__global__ void __launch_bounds__(kThreads) stream_copy_kernel(const uint4* from, uint4* to, long vectors) {
  const long first = first_vector();
  uint4 v[kLoadsInFlight];
  load_part(from, first, vectors, v);
#pragma unroll
  for (int u = 0; u < kLoadsInFlight; ++u)
    if (first + u * kThreads < vectors) to[first + u * kThreads] = v[u];
}

/// How many blocks it takes, with one part each.
unsigned parts(long vectors) {
  constexpr long part = kThreads * kLoadsInFlight;
  return unsigned((vectors + part - 1) / part);
}

}  // namespace

void enqueue_random_fill(CUstream_st* stream, void* data, std::size_t bytes) {
  random_fill_kernel<<<4096, kThreads, 0, stream>>>(static_cast<uint4*>(data), long(bytes / sizeof(uint4)));
}

void enqueue_stream_read(CUstream_st* stream, const void* data, std::size_t bytes, unsigned* sink) {
  const long vectors = long(bytes / sizeof(uint4));
  stream_read_kernel<<<parts(vectors), kThreads, 0, stream>>>(static_cast<const uint4*>(data), vectors, sink);
}

void enqueue_stream_copy(CUstream_st* stream, const void* from, void* to, std::size_t bytes) {
  const long vectors = long(bytes / sizeof(uint4));
  stream_copy_kernel<<<parts(vectors), kThreads, 0, stream>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to),
                                                              vectors);
}

}  // namespace cf::apps
