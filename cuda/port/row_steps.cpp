#include "cuda/port/row_steps.hpp"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "core/model/passes.hpp"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/port/row_ops.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

/// The walk of a step, as MovableGraph takes it.
auto walk_of(const RowOps& ops, const ops::DecodeLayer::Args& a, const TokenRows& rows) {
  return [&ops, &a, &rows](auto&& f) {
    return for_each_op_of_rows(ops.few, a, rows, [&]<class Args>(const Site& site, const Args& args) {
      std::int64_t number = 0;
      if constexpr (std::is_same_v<Args, ops::Attention::Args>) number = args.max_kv_len;
      if constexpr (std::is_same_v<Args, AppendRows::Args>) number = rows.last;
      return f(args, ops.mode(site), number);
    });
  };
}

}  // namespace

Result<RowOps> row_ops(const Target& target, const ops::DecodeLayer::Args& a) {
  CF_TRY_ASSIGN(Program program, record_layer(a.model, a.weights, a.t));
  program = with_ln_qkv(std::move(program), [&](Node& node) { return takes(target, node); });
  CF_TRY_ASSIGN(StepPlan plan, choose(target, std::move(program)));
  set_graph_modes(target.arch, plan);
  RowOps ops;
  for (const PlannedNode& n : plan.nodes) {
    ops.few = ops.few || std::holds_alternative<ops::LnQkv::Args>(n.node.call);
    ops.modes[n.node.at.site.id] = n.mode;
  }
  return ops;
}

Status prepare_layer(const ops::DecodeLayer::Args& a, const TokenRows& rows, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  CF_TRY_ASSIGN(const RowOps ops, row_ops(target_of(launches), a));
  return for_each_op_of_rows(ops.few, a, rows, [&](const Site& site, const auto& args) {
    launches.set_label(ops.few ? nullptr : site.name.data());  // a literal, which ends in a zero byte
    return prepare(args, launches);
  });
}

Status RowSteps::capture(const AttentionPlan& plan, const ops::DecodeLayer::Args& a, const TokenRows& rows) {
  LaunchList checked(context_);
  checked.trust_addresses();
  CF_TRY(check_call(a, checked));
  CF_TRY_ASSIGN(RowOps ops, row_ops(target_of(checked), a));
  CF_TRY_ASSIGN(MovableGraph graph, MovableGraph::create(context_, walk_of(ops, a, rows)));
  captured_.push_back({.plan = plan, .ops = std::move(ops), .graph = std::move(graph)});
  return {};
}

Status RowSteps::step(const ops::DecodeLayer::Args& a, const TokenRows& rows, CUstream_st* stream) {
  if (rows.first != rows.last)
    return bad_argument(ops::DecodeLayer::name, "rows before " + std::to_string(rows.last) +
                                                    " must be entries of the cache, got rows that are none from " +
                                                    std::to_string(rows.first) + " on");
  // The plan divides by kv_heads, before capture() checks the call.
  CF_TRY(check_kv_heads(ops::DecodeLayer::name, a.t.q.shape[1], a.t.k_cache.shape[1]));
  const ops::Attention::Args attention{.q = a.t.q,
                                       .k_cache = a.t.k_cache,
                                       .v_cache = a.t.v_cache,
                                       .kv_len = a.t.kv_len,
                                       .y = a.t.context,
                                       .max_kv_len = a.t.max_kv_len};
  const AttentionPlan plan = attention_plan(context_.arch(), ops::Attention::dims(attention), a.t.q.dtype);
  const auto found = std::ranges::find(captured_, plan, &Captured::plan);
  if (found == captured_.end()) {
    CF_TRY(capture(plan, a, rows));
    return captured_.back().graph.launch(stream);
  }
  const Result<bool> moved = found->graph.move(walk_of(found->ops, a, rows));
  if (moved && *moved) return found->graph.launch(stream);
  captured_.erase(found);
  CF_TRY(moved.status());
  CF_TRY(capture(plan, a, rows));
  return captured_.back().graph.launch(stream);
}

}  // namespace cf::cuda
