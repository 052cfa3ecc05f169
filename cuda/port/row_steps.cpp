#include "cuda/port/row_steps.hpp"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda/ops/run.hpp"
#include "cuda/port/row_ops.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

/// The walk of a step, as MovableGraph takes it.
auto walk_of(const LayerOps& ops, const ops::DecodeLayer::Args& a, const TokenRows& rows) {
  return [&ops, &a, &rows](auto&& f) {
    return for_each_op_of_rows(ops, a, rows, [&]<class Args>(const Args& args, const LaunchMode& mode, const char*) {
      std::int64_t number = 0;
      if constexpr (std::is_same_v<Args, ops::Attention::Args>) number = args.max_kv_len;
      if constexpr (std::is_same_v<Args, AppendRows::Args>) number = rows.last;
      return f(args, mode, number);
    });
  };
}

}  // namespace

Status prepare_layer(const ops::DecodeLayer::Args& a, const TokenRows& rows, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  return for_each_op_of_rows(layer_ops(launches.arch(), a.model, a.weights, a.t), a, rows,
                             [&](const auto& args, const LaunchMode&, const char* label) {
                               launches.set_label(label);
                               return prepare(args, launches);
                             });
}

Status RowSteps::capture(const AttentionPlan& plan, const ops::DecodeLayer::Args& a, const TokenRows& rows) {
  LaunchList checked(context_);
  checked.trust_addresses();
  CF_TRY(check_call(a, checked));
  const LayerOps ops = layer_ops(context_.arch(), a.model, a.weights, a.t);
  CF_TRY_ASSIGN(MovableGraph graph, MovableGraph::create(context_, walk_of(ops, a, rows)));
  captured_.push_back({.plan = plan, .ops = ops, .graph = std::move(graph)});
  return {};
}

Status RowSteps::step(const ops::DecodeLayer::Args& a, const TokenRows& rows, CUstream_st* stream) {
  if (rows.first != rows.last)
    return bad_argument(ops::DecodeLayer::name, "rows before " + std::to_string(rows.last) +
                                                    " must be entries of the cache, got rows that are none from " +
                                                    std::to_string(rows.first) + " on");
  // The plan divides by kv_heads, before capture() checks the call.
  CF_TRY(check_kv_heads(ops::DecodeLayer::name, a.t.q.shape[1], a.t.k_cache.shape[1]));
  const AttentionPlan plan = attention_plan(context_.arch(), a.t);
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
