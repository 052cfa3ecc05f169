#include <cuda_runtime.h>

#include "tests/cuda/occupy.hpp"

namespace cf::test {
namespace {

constexpr int kSmemBytes = 200 << 10;

__global__ void occupy_kernel(long long time_ns) {
  extern __shared__ char smem[];
  smem[threadIdx.x] = 0;
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < time_ns);
}

}  // namespace

void enqueue_occupy(CUstream_st* stream, int blocks, int time_ms) {
  (void)cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  occupy_kernel<<<unsigned(blocks), 32, kSmemBytes, stream>>>(time_ms * 1'000'000ll);
}

}  // namespace cf::test
