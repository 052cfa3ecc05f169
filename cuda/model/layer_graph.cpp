#include "cuda/model/layer_graph.hpp"

#include "cuda/model/layer_ops.hpp"

namespace cf::cuda {

Status capture_layer(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, DataflowCapture& graph) {
  return for_each_layer_op(graph.arch(), m, w, t,
                           [&](const auto& args, const LaunchMode& mode) { return graph.run(args, mode); });
}

}  // namespace cf::cuda
