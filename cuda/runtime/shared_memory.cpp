#include "cuda/runtime/shared_memory.hpp"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda/runtime/check.hpp"

namespace cf::cuda {

Status allow_shared_memory(std::string_view op, const void* kernel, std::size_t bytes) {
  if (bytes == 0) return {};
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::size_t> allowed;
  int device = 0;
  CF_TRY(from_cuda(cudaGetDevice(&device), op));
  const std::lock_guard lock(mutex);
  std::size_t& most = allowed[{device, kernel}];
  if (bytes <= most) return {};
  CF_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op));
  most = bytes;
  return {};
}

Status allow_cluster(std::string_view op, const void* kernel, int blocks) {
  constexpr int portable = 8;  // CUDA's, which needs no permission
  if (blocks <= portable) return {};
  return from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), op);
}

}  // namespace cf::cuda
