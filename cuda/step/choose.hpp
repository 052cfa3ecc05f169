#pragma once
// A step's kernels, chosen: node by node the first kernel of the op's list that takes the call, and how its launches
// stand beside those of the other nodes. Without CUDA's headers: a choice needs no GPU. Private to cuda.
#include <vector>

#include "core/model/program.hpp"
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/linear/pack/format.hpp"

namespace cf::cuda {

/// A node and its kernel.
struct PlannedNode {
  Node node;
  Choice choice;
  LaunchMode mode{};
};

/// A program whose kernels are chosen.
struct StepPlan {
  std::vector<PlannedNode> nodes;
};

/// The order in which a packed query_key_value must have its rows for the fused ops of a layer.
RopePairs qkv_pairs(const ModelSpec& m);

/// Whether a fused node's call has a kernel that is faster than those of its parts. The node keeps the choice.
bool takes(const Target& target, Node& node);

/// Puts fused calls into the place of their parts wherever a layer's fused calls have kernels, and these are faster:
///   ln_qkv                 makes q, k and v of few tokens of layers with LayerNorm
///   rms_qkv, rms_linear    normalise one token of layers with RMSNorm and packed weights; both of them, or none
///   linear_sum             makes both sums of a parallel residual, with packed weights of few tokens or with dense
///                          weights of 9 to 128
///   rope_append            takes the place of rope and kv_append in all other layers
/// Nodes outside the layers stay as they are.
Program fuse(const Target& target, Program program);

/// Checks every call by its contract and chooses its kernel, but for nodes that keep a choice. The modes are those of
/// launches one after the other.
Result<StepPlan> choose(const Target& target, Program program);

/// Sets the modes of a graph, in which a node waits only for nodes whose data it needs. In a layer the nodes' plans say
/// which start early; outside the layers all do but the LM head.
void set_graph_modes(const Arch& arch, StepPlan& plan);

/// A step as a graph has it: fuse(), choose() and set_graph_modes().
Result<StepPlan> plan_graph(const Target& target, Program program);

}  // namespace cf::cuda
