#include "cuda/persistent/launch.hpp"

#include <cuda_runtime_api.h>

#include "cuda/runtime/check.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace cf::cuda {
const void* persistent_kernels(const PersistentPlan& plan, DType dtype) {
  const auto of_dtype = [&](auto* f16, auto* bf16) { return (dtype == DType::f16 ? f16 : bf16)(plan.products); };
  if (is_packed(plan.products)) return of_dtype(packed_kernels_f16, packed_kernels_bf16);
  return plan.gqa_heads > 1 ? of_dtype(grouped_kernels_f16, grouped_kernels_bf16)
                            : of_dtype(persistent_kernels_f16, persistent_kernels_bf16);
}

const void* rank_kernels(const PersistentPlan& plan, DType dtype) {
  const auto of_dtype = [&](auto* f16, auto* bf16) { return (dtype == DType::f16 ? f16 : bf16)(plan.products); };
  return plan.gqa_heads > 1 ? of_dtype(grouped_rank_kernels_f16, grouped_rank_kernels_bf16)
                            : of_dtype(rank_kernels_f16, rank_kernels_bf16);
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
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative;
  cudaLaunchConfig_t config{};
  config.gridDim = {unsigned(arguments.plan.grid), 1, 1};
  config.blockDim = {unsigned(kBlockThreads), 1, 1};
  config.dynamicSmemBytes = std::size_t(arguments.plan.smem_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* parameters[] = {const_cast<PersistentArguments*>(&arguments)};
  return from_cuda(cudaLaunchKernelExC(&config, kernel, parameters), kPersistentName);
}

}  // namespace cf::cuda
