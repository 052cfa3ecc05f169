#include "cuda/dataflow_capture.hpp"

namespace cf::cuda {
namespace {

// CUDA 13 gave these calls the names of their predecessors.
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

Status DataflowCapture::begin(const std::vector<int>& after, bool early) {
  std::vector<cudaGraphNode_t> nodes;
  for (int task : after) nodes.push_back(nodes_[std::size_t(task)]);
  cudaGraphEdgeData edge{};
  if (early) {
    edge.from_port = cudaGraphKernelNodePortProgrammatic;
    edge.type = cudaGraphDependencyTypeProgrammatic;
  }
  return from_cuda(set_dependencies(context_.stream(), nodes, std::vector(nodes.size(), edge)),
                   "cudaStreamUpdateCaptureDependencies");
}

Status DataflowCapture::end() {
  const cudaGraphNode_t* nodes = nullptr;
  std::size_t count = 0;
  CF_TRY(from_cuda(get_dependencies(context_.stream(), &nodes, &count), "cudaStreamGetCaptureInfo"));
  nodes_.push_back(nodes[count - 1]);
  return {};
}

}  // namespace cf::cuda
