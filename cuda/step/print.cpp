#include "cuda/step/print.hpp"

#include <cstdio>
#include <utility>

#include "core/model/passes.hpp"
#include "cuda/step/outline.hpp"

namespace cf::cuda {
namespace {

std::string to_string(const LaunchMode& m) {
  std::string text;
  const auto add = [&](bool is_so, const std::string& word) {
    if (is_so) text += (text.empty() ? "" : ", ") + word;
  };
  add(!m.early, "late");
  add(m.after_waiting, "after waiting");
  add(m.shares_sms, "shares SMs");
  add(m.leaves_room, "leaves room");
  add(m.urgent, "urgent");
  add(m.shared_percent > 0, std::to_string(m.shared_percent) + " % of the L1 shared");
  return text;
}

/// "14.7 MB", with three digits.
std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "KB", "MB", "GB"};
  int unit = 0;
  for (; bytes >= 1000 && unit < 3; ++unit) bytes /= 1000;
  char text[32];
  std::snprintf(text, sizeof text,
                unit == 0 || bytes >= 100 ? "%.0f %s"
                : bytes >= 10             ? "%.1f %s"
                                          : "%.2f %s",
                bytes, units[unit]);
  return text;
}

}  // namespace

std::string to_string(const StepPlan& plan, bool reasons) {
  std::string text;
  for (const PlannedNode& n : plan.nodes) {
    const std::string mode = to_string(n.mode);
    text += std::string(n.node.at.site.name) + ": " + std::string(n.choice.kernel) + ", " +
            bytes_text(cost_of(n.node.call).bytes) + (mode.empty() ? "" : "; " + mode) + "\n    " +
            n.choice.planned.text() + "\n";
    for (const PassedOver& p : n.choice.passed_over)
      if (reasons) text += "    not " + std::string(p.kernel) + ": " + p.reason + "\n";
  }
  return text;
}

Result<StepPlan> plan_step(const Arch& arch, const StepQuery& query) {
  // One layer: the layers of a model are alike.
  ModelSpec model = query.model;
  model.shape.num_layers = 1;
  const StepOutline outline(model, query.sizes, query.activation, query.linears, query.ends ? query.sizes.batch : 0);
  CF_TRY_ASSIGN(Program program, outline.record());
  const ModelTensors& t = outline.tensors;
  const AnyView<2> part(t.logits.data, t.logits.shape, t.logits.dtype);  // any place: nothing is read
  program = with_rank_head(with_all_reduce(std::move(program), model), model, 0, part);
  std::erase_if(program.nodes, [&](const Node& n) { return n.at.layer < 0 && !query.ends; });
  for (Node& n : program.nodes)
    if (n.at.layer == 0) n.at.layer = query.layer;
  const Target target{.arch = arch, .scratch = {reinterpret_cast<std::byte*>(256), std::size_t(1) << 40}};
  return plan_graph(target, std::move(program));
}

}  // namespace cf::cuda
