#include "cuda/step/graph.hpp"

namespace cf::cuda {
namespace {

// CUDA 13 has dropped the suffixes _v2 and _v3 from the names of these calls.
cudaError_t set_dependencies(cudaStream_t stream, std::vector<cudaGraphNode_t>& nodes,
                             const std::vector<cudaGraphEdgeData>& edges) {
#if CUDART_VERSION >= 13000
  return cudaStreamUpdateCaptureDependencies(stream, nodes.data(), edges.data(), nodes.size(),
                                             cudaStreamSetCaptureDependencies);
#else
  return cudaStreamUpdateCaptureDependencies_v2(stream, nodes.data(), edges.data(), nodes.size(),
                                                cudaStreamSetCaptureDependencies);
#endif
}

cudaError_t get_dependencies(cudaStream_t stream, const cudaGraphNode_t** nodes, std::size_t* count) {
  cudaStreamCaptureStatus status;
  const cudaGraphEdgeData* edges = nullptr;
#if CUDART_VERSION >= 13000
  return cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, nodes, &edges, count);
#else
  return cudaStreamGetCaptureInfo_v3(stream, &status, nullptr, nullptr, nodes, &edges, count);
#endif
}

}  // namespace

Status DataflowCapture::add(std::span<const void* const> reads, std::span<const void* const> writes,
                            const LaunchList& launches, bool early) {
  std::vector<const void*> all_writes(writes.begin(), writes.end());
  if (launches.uses_scratch()) all_writes.push_back(launches.scratch().data);
  std::vector<cudaGraphNode_t> after;
  std::vector<cudaGraphEdgeData> edges;
  for (int op : flow_.add(reads, all_writes))
    for (cudaGraphNode_t node : nodes_[std::size_t(op)]) {
      cudaGraphNodeType type;
      CF_TRY(from_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType"));
      after.push_back(node);
      edges.emplace_back();
      // A library's kernel does not wait for its predecessors by itself, and only a kernel lets its successor start.
      if (!early || launches.has_calls() || type != cudaGraphNodeTypeKernel) continue;
      edges.back().from_port = cudaGraphKernelNodePortProgrammatic;
      edges.back().type = cudaGraphDependencyTypeProgrammatic;
    }
  CF_TRY(from_cuda(set_dependencies(context_.stream(), after, edges), "cudaStreamUpdateCaptureDependencies"));
  // The edges say which launches are early; the launches themselves must not.
  CF_TRY(launches.submit(context_.stream()));

  const cudaGraphNode_t* nodes = nullptr;
  std::size_t count = 0;
  CF_TRY(from_cuda(get_dependencies(context_.stream(), &nodes, &count), "cudaStreamGetCaptureInfo"));
  nodes_.emplace_back(nodes, nodes + count);
  return {};
}

}  // namespace cf::cuda
