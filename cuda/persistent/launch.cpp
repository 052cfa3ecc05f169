#include "cuda/persistent/launch.hpp"

#include <cuda_runtime_api.h>

#include "cuda/runtime/check.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace cf::cuda {
namespace {

/// Calls f(config) with the configuration of a plan's launch.
template <class F>
Status with_launch(const PersistentPlan& plan, bool cooperative, CUstream_st* stream, F f) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = cooperative;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(plan.attention_splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {unsigned(plan.grid), 1, 1};
  config.blockDim = {unsigned(kBlockThreads), 1, 1};
  config.dynamicSmemBytes = std::size_t(plan.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = plan.cluster_merge ? 2 : 1;
  return from_cuda(f(config), kPersistentName);
}

}  // namespace

const void* persistent_kernels(const PersistentPlan& plan, DType dtype) {
  const auto of_dtype = [&](auto* f16, auto* bf16) { return (dtype == DType::f16 ? f16 : bf16)(plan.products); };
  if (is_packed(plan.products)) return of_dtype(packed_kernels_f16, packed_kernels_bf16);
  return plan.share_heads > 1 ? of_dtype(grouped_kernels_f16, grouped_kernels_bf16)
                              : of_dtype(persistent_kernels_f16, persistent_kernels_bf16);
}

Status prepare_persistent(const void* kernel, const PersistentPlan& plan, int device) {
  CF_TRY(allow_shared_memory(kPersistentName, kernel, std::size_t(plan.smem_bytes)));
  int sm_count = 0, blocks_per_sm = 0;
  CF_TRY(from_cuda(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device), kPersistentName));
  CF_TRY(from_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, kBlockThreads,
                                                                 std::size_t(plan.smem_bytes)),
                   kPersistentName));
  return check_resident(plan, sm_count, blocks_per_sm);
}

Status launch_persistent(const void* kernel, const PersistentArguments& arguments, bool cooperative,
                         CUstream_st* stream) {
  return with_launch(arguments.plan, cooperative, stream, [&](const cudaLaunchConfig_t& config) {
    void* parameters[] = {const_cast<PersistentArguments*>(&arguments)};
    return cudaLaunchKernelExC(&config, kernel, parameters);
  });
}

Result<int> resident_cluster_blocks(const void* kernel, const PersistentPlan& plan) {
  int clusters = 0;
  CF_TRY(allow_shared_memory(kPersistentName, kernel, std::size_t(plan.smem_bytes)));
  CF_TRY(with_launch(plan, false, nullptr, [&](const cudaLaunchConfig_t& config) {
    return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  }));
  return clusters * plan.attention_splits;
}

}  // namespace cf::cuda
