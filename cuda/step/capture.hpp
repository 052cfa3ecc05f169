#pragma once
// A step's plan as launches: on a stream, or in a graph. Private to cuda.
#include "core/model/layer.hpp"
#include "cuda/step/choose.hpp"
#include "cuda/step/graph.hpp"

namespace cf::cuda {

/// Checks a node's call, chooses its kernel and adds its launches.
Status prepare(const Node& node, LaunchList& launches);
/// Checks where a node's tensors lie and adds its launches, by the kernel that was chosen for it. The list has the
/// node's mode, or that of launches one after the other.
Status prepare(const PlannedNode& node, LaunchList& launches);

/// Adds the nodes of a plan to a graph, each in its mode.
Status capture_plan(const StepPlan& plan, DataflowCapture& graph);

/// Adds one layer to a graph, as plan_graph() plans it. Outputs have the same bits as those of sites that are launched
/// one by one. Tensors between the parts of a fused call are not written.
Status capture_layer(const ModelSpec& model, const LayerWeights& weights, const LayerTensors& tensors,
                     DataflowCapture& graph);

}  // namespace cf::cuda
