#include "cuda/graph/capture.hpp"

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
                            const LaunchList& launches, const LaunchMode& mode) {
  std::vector<cudaGraphNode_t> after;
  for (int op : flow_.add(reads, writes)) after.push_back(nodes_[std::size_t(op)]);
  cudaGraphEdgeData edge{};
  if (mode.early) {
    edge.from_port = cudaGraphKernelNodePortProgrammatic;
    edge.type = cudaGraphDependencyTypeProgrammatic;
  }
  CF_TRY(from_cuda(set_dependencies(context_.stream(), after, std::vector(after.size(), edge)),
                   "cudaStreamUpdateCaptureDependencies"));
  // The edges say which launches are early; the launches themselves must not.
  CF_TRY(launches.submit(context_.stream(), {.urgent = mode.urgent, .side_by_side = mode.side_by_side}));

  const cudaGraphNode_t* nodes = nullptr;
  std::size_t count = 0;
  CF_TRY(from_cuda(get_dependencies(context_.stream(), &nodes, &count), "cudaStreamGetCaptureInfo"));
  nodes_.push_back(nodes[count - 1]);
  return {};
}

}  // namespace cf::cuda
