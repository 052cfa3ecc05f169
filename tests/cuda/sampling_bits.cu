#include "tests/cuda/sampling_bits.hpp"

namespace cf::test {
namespace {

constexpr int kThreads = 256;

__global__ void sampling_bits_kernel(const SamplingInput* in, SamplingBits* bits, int n) {
  const int i = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (i < n) bits[i] = sampling_bits(in[i]);
}

}  // namespace

void sampling_bits_on_device(const SamplingInput* in, SamplingBits* bits, int n, CUstream_st* stream) {
  sampling_bits_kernel<<<unsigned((n + kThreads - 1) / kThreads), kThreads, 0, stream>>>(in, bits, n);
}

}  // namespace cf::test
