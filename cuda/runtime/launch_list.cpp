#include "cuda/runtime/launch_list.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/runtime/check.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/range.hpp"
#include "cuda/runtime/shared_memory.hpp"
#include "cuda/runtime/stream.hpp"

namespace cf::cuda {

Status LaunchList::add(std::string_view op, const LaunchShape& shape, const void* kernel, const Argument* arguments,
                       std::size_t argument_count) {
  if (argument_count > kMaxArguments)
    return Status::error(Code::device_error, std::string(op) + ": expected a kernel of at most " +
                                                 std::to_string(kMaxArguments) + " arguments, got " +
                                                 std::to_string(argument_count));
  CF_TRY(allow_shared_memory(op, kernel, shape.smem_bytes));
  CF_TRY(allow_cluster(op, kernel, shape.cluster_blocks));
  if (peers_) {
    // CUDA loads a kernel at its first use, and may wait for the device then. That may be in an exchange with a rank which
    // this thread keeps from going on.
    const RelaxedCapture relaxed;
    cudaFuncAttributes loaded;
    CF_TRY(from_cuda(cudaFuncGetAttributes(&loaded, kernel), op));
  }
  launches_.push_back({.op = op,
                       .label = label_ ? label_ : op.data(),
                       .kernel = kernel,
                       .call = {},
                       .grid = {shape.grid.x, shape.grid.y, shape.grid.z},
                       .block = {shape.block.x, shape.block.y, shape.block.z},
                       .smem_bytes = shape.smem_bytes,
                       .cluster_blocks = shape.cluster_blocks,
                       .first_argument = offsets_.size(),
                       .argument_count = argument_count});
  for (std::size_t i = 0; i < argument_count; ++i) {
    const std::size_t at = values_.size();
    offsets_.push_back(at);
    values_.resize(at + (arguments[i].bytes + sizeof(Unit) - 1) / sizeof(Unit));
    std::memcpy(&values_[at], arguments[i].data, arguments[i].bytes);
  }
  return {};
}

void LaunchList::add_call(std::string_view op, Call call) {
  Launch l{};
  l.op = op;
  l.label = label_ ? label_ : op.data();
  l.call = std::move(call);
  launches_.push_back(std::move(l));
  has_calls_ = true;
}

LaunchList::Arguments LaunchList::arguments_of(const Launch& l) const {
  Arguments arguments{};
  for (std::size_t i = 0; i < l.argument_count; ++i)
    arguments[i] = const_cast<Unit*>(&values_[offsets_[l.first_argument + i]]);
  return arguments;
}

bool LaunchList::is_like(const LaunchList& other) const {
  const auto is_same = [](const Launch& a, const Launch& b) {
    return a.kernel && a.kernel == b.kernel && std::ranges::equal(a.grid, b.grid) &&
           std::ranges::equal(a.block, b.block) && a.smem_bytes == b.smem_bytes && a.cluster_blocks == b.cluster_blocks;
  };
  return std::ranges::equal(launches_, other.launches_, is_same);
}

Status LaunchList::rewrite(std::size_t i, CUgraphExec_st* graph, CUgraphNode_st* node) const {
  const Launch& l = launches_[i];
  Arguments arguments = arguments_of(l);
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(l.kernel);
  params.gridDim = {l.grid[0], l.grid[1], l.grid[2]};
  params.blockDim = {l.block[0], l.block[1], l.block[2]};
  params.sharedMemBytes = unsigned(l.smem_bytes);
  params.kernelParams = arguments.data();
  return from_cuda(cudaGraphExecKernelNodeSetParams(graph, node, &params), l.op);
}

Status LaunchList::submit_call(const Launch& l, CUstream_st* stream) {
  // A library loads its kernels at their first use, also where that use is captured.
  const RelaxedCapture relaxed;
  if (Status s = l.call(stream); !s) return Status::error(s.code(), std::string(l.op) + ": " + s.message());
  return {};
}

Status LaunchList::submit(CUstream_st* stream, const Submission& how) const {
  int least_priority = 0, greatest_priority = 0;
  if (mode_.urgent)
    CF_TRY(from_cuda(cudaDeviceGetStreamPriorityRange(&least_priority, &greatest_priority), "stream priorities"));
  for (const Launch& l : launches_) {
    const Range range(l.label);
    if (!l.kernel) {
      CF_TRY(submit_call(l, stream));
      continue;
    }
    std::array<cudaLaunchAttribute, 4> attributes;
    cudaLaunchConfig_t config{};
    config.gridDim = {l.grid[0], l.grid[1], l.grid[2]};
    config.blockDim = {l.block[0], l.block[1], l.block[2]};
    config.dynamicSmemBytes = l.smem_bytes;
    config.stream = stream;
    config.attrs = attributes.data();
    if (how.early && !(how.first_waits && &l == launches_.data())) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (mode_.urgent) {
      attributes[config.numAttrs].id = cudaLaunchAttributePriority;
      attributes[config.numAttrs++].val.priority = greatest_priority;
    }
    if (mode_.shared_percent > 0) {
      attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
      attributes[config.numAttrs++].val.sharedMemCarveout = mode_.shared_percent;
    }
    if (l.cluster_blocks > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {unsigned(l.cluster_blocks), 1, 1};
    }
    Arguments arguments = arguments_of(l);
    CF_TRY(from_cuda(cudaLaunchKernelExC(&config, l.kernel, arguments.data()), l.op));
  }
  return {};
}

}  // namespace cf::cuda
