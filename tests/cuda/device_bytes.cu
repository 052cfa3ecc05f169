#include "tests/cuda/device_bytes.hpp"

#include "cuda/device/sync.cuh"

namespace cf::test {
namespace {

constexpr unsigned kBlocks = 132, kThreads = 256;

template <class F>
__device__ void for_each_byte(const BytePair* pairs, int count, F f) {
  for (int p = 0; p < count; ++p)
    for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < pairs[p].bytes; i += kBlocks * kThreads)
      f(pairs[p].data[i], pairs[p].other[i]);
}

__global__ void restore_kernel(const BytePair* pairs, int count) {
  cuda::let_successor_start();
  __nanosleep(4000);
  for_each_byte(pairs, count, [](std::byte& mine, std::byte other) { mine = other; });
}

__global__ void count_kernel(const BytePair* pairs, int count, unsigned long long* different) {
  unsigned long long mine_differ = 0;
  for_each_byte(pairs, count, [&](std::byte& mine, std::byte other) {
    mine_differ += mine != other;
    mine = std::byte{0xff};
  });
  if (mine_differ) atomicAdd(different, mine_differ);
}

}  // namespace

void restore_late(const BytePair* pairs, int count, CUstream_st* stream) {
  restore_kernel<<<kBlocks, kThreads, 0, stream>>>(pairs, count);
}

void count_differences_and_scrub(const BytePair* pairs, int count, std::uint64_t* different, CUstream_st* stream) {
  count_kernel<<<kBlocks, kThreads, 0, stream>>>(pairs, count, reinterpret_cast<unsigned long long*>(different));
}

}  // namespace cf::test
