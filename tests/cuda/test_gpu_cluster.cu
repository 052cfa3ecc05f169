// The inbox of cuda/device/cluster.cuh by itself: what it receives is what was sent, bit by bit.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/device/cluster.cuh"
#include "tests/support/catch.hpp"

namespace {

constexpr int kClusters = 100;  // of one launch, all with the same input

/// The first `used` blocks of each cluster send to the block of rank `to`; the rest leave. in: (size, n), out:
/// (clusters, used, n). The sender's rank decides how late it comes.
__global__ void inbox_kernel(const float* in, float* out, int n, int size, int used, int to) {
  extern __shared__ float4 smem[];
  __shared__ std::uint64_t arrived;
  float* const all = reinterpret_cast<float*>(smem);
  cf::cuda::ClusterInbox inbox(&arrived);
  inbox.open();
  const int rank = int(blockIdx.x) % size, cluster = int(blockIdx.x) / size;
  if (rank >= used && rank != to) return;
  inbox.connect();
  if (rank < used) {
    __nanosleep(unsigned(rank ^ cluster) % 8 * 200);
    for (int i = threadIdx.x; i < n; i += blockDim.x) inbox.send(unsigned(to), all + rank * n + i, in[rank * n + i]);
  }
  if (rank != to) return;
  inbox.receive(used * n * int(sizeof(float)));
  for (int i = threadIdx.x; i < used * n; i += blockDim.x) out[long(cluster) * used * n + i] = all[i];
}

void require_cuda(cudaError_t e) {
  INFO(cudaGetErrorString(e));
  REQUIRE(e == cudaSuccess);
}

/// Launches inbox_kernel on kClusters clusters of `size` blocks and brings its output back.
std::vector<float> run_inbox(const std::vector<float>& in, int n, int size, int used, int to) {
  const std::size_t out_size = std::size_t(kClusters * used * n);
  float *device_in = nullptr, *device_out = nullptr;
  std::vector<float> out(out_size);
  require_cuda(cudaMalloc(&device_in, in.size() * sizeof(float)));
  require_cuda(cudaMalloc(&device_out, out_size * sizeof(float)));
  require_cuda(cudaMemcpy(device_in, in.data(), in.size() * sizeof(float), cudaMemcpyHostToDevice));
  require_cuda(cudaMemset(device_out, 0xff, out_size * sizeof(float)));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(kClusters * size));
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = std::size_t(size * n) * sizeof(float);
  config.attrs = &attribute;
  config.numAttrs = 1;
  require_cuda(
      cudaLaunchKernelEx(&config, inbox_kernel, static_cast<const float*>(device_in), device_out, n, size, used, to));
  require_cuda(cudaMemcpy(out.data(), device_out, out_size * sizeof(float), cudaMemcpyDeviceToHost));
  cudaFree(device_in);
  cudaFree(device_out);
  return out;
}

std::vector<float> random_values(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = normal(random) * std::exp2(float(int(random() % 20) - 10));
  return x;
}

/// How many of out's consecutive copies of `expected` differ in any bit.
std::size_t wrong_copies(const std::vector<float>& out, const std::vector<float>& expected) {
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < out.size(); i += expected.size())
    wrong += std::memcmp(out.data() + i, expected.data(), expected.size() * sizeof(float)) != 0;
  return wrong;
}

}  // namespace

TEST_CASE("cluster inbox: one block gets what the first ranks sent, whoever leaves before", "[gpu][cluster]") {
  for (int size : {2, 4, 8})
    for (int n : {1, 82, 256, 1000})
      for (int used = 1; used <= size; ++used)
        for (int to : {0, size - 1}) {
          INFO("size " << size << ", n " << n << ", used " << used << ", to " << to);
          const std::vector<float> in = random_values(used * n, unsigned(n));
          const auto out = run_inbox(in, n, size, used, to);
          CHECK(wrong_copies(out, in) == 0);
        }
}
