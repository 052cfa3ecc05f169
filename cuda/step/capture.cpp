#include "cuda/step/capture.hpp"

#include "core/model/passes.hpp"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {

Status prepare(const Node& node, LaunchList& launches) {
  return std::visit([&](const auto& args) { return prepare(args, launches); }, node.call);
}

Status prepare(const PlannedNode& node, LaunchList& launches) {
  CF_TRY(std::visit([&](const auto& args) { return check_addresses(args, launches); }, node.node.call));
  return node.choice.planned.prepare(launches);
}

Status capture_plan(const StepPlan& plan, DataflowCapture& graph) {
  for (const PlannedNode& node : plan.nodes) {
    LaunchList launches = graph.launches(node.mode);
    CF_TRY(prepare(node, launches));
    CF_TRY(graph.add(node.node.reads, node.node.writes, launches, node.mode.early));
  }
  return {};
}

Status capture_layer(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, DataflowCapture& graph) {
  CF_TRY_ASSIGN(Program program, record_layer(m, w, t));
  program = with_all_reduce(std::move(program), m);
  CF_TRY_ASSIGN(const StepPlan plan, plan_graph(target_of(graph.launches({})), std::move(program)));
  return capture_plan(plan, graph);
}

}  // namespace cf::cuda
