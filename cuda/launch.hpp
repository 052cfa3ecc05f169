#pragma once
// One way to launch. Private to cuda, for nvcc alone.
#include <cuda_runtime.h>

#include <utility>

#include "cuda/check.hpp"

namespace cf::cuda {

struct LaunchShape {
  dim3 grid, block;
  std::size_t smem_bytes = 0;
  int cluster_blocks = 1;  // along x
};

/// Shared memory's percentage of an SM's L1 where kernels run side by side: on an H200 132 KB, which hold attention's
/// block beside a product's three, while the rest is room enough for the products' loads to land in. Of 44, 58,
/// 65, 72 and 100, Pythia-2.8B with a cache of 2048 is fastest with 58 and 65, and with 100 slower than with divisions of
/// the driver's own.
inline constexpr int kSideBySideSharedPercent = 58;

/// Launches on the context's stream, unless the context is in a dry run. In an overlapping context the kernel may start
/// before its predecessors are done: it must call wait_for_predecessors() before it touches anything that they write or
/// read.
template <class... Params, class... Args>
Status launch(std::string_view op, const Context& context, const LaunchShape& shape, void (*kernel)(Params...),
              Args&&... args) {
  if (context.dry_run()) return {};
  // The 48 KB that need no leave count a kernel's static shared memory, too.
  if (shape.smem_bytes > 0)
    CF_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.smem_bytes)),
                     op));
  cudaLaunchAttribute attributes[4];
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = context.stream();
  config.attrs = attributes;
  if (context.overlap()) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (context.urgent()) {
    int least = 0, greatest = 0;
    CF_TRY(from_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), op));
    attributes[config.numAttrs].id = cudaLaunchAttributePriority;
    attributes[config.numAttrs++].val.priority = greatest;
  }
  if (context.side_by_side()) {
    attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[config.numAttrs++].val.sharedMemCarveout = kSideBySideSharedPercent;
  }
  if (shape.cluster_blocks > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {unsigned(shape.cluster_blocks), 1, 1};
  }
  return from_cuda(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), op);
}

}  // namespace cf::cuda
