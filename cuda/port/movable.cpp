#include "cuda/port/movable.hpp"

#include <string>

namespace cf::cuda {

Status MovableGraph::keep(Operands operands, LaunchList launches, std::span<CUgraphNode_st* const> nodes) {
  if (launches.size() != 1 || launches.has_calls() || nodes.size() != 1)
    return Status::error(Code::unimplemented, "a graph whose tensors move: expected ops of one kernel each, got " +
                                                  std::to_string(launches.size()) + " launches");
  ops_.push_back({.operands = std::move(operands), .launches = std::move(launches), .node = nodes[0]});
  return {};
}

Status MovableGraph::launch(CUstream_st* stream) const {
  return from_cuda(cudaGraphLaunch(exec_.get(), stream), "cudaGraphLaunch");
}

}  // namespace cf::cuda
