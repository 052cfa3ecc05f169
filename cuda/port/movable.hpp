#pragma once
// CUDA graphs whose tensors move from launch to launch. Private to cuda.
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cuda/step/graph.hpp"

namespace cf::cuda {

/// A CUDA graph of ops whose tensors may lie elsewhere at every launch. An op that moved is checked and planned again,
/// and its kernel in the graph takes the new arguments. Launches that are on a stream already keep their arguments. Not
/// shared between threads.
class MovableGraph {
 public:
  /// Captures a walk: walk(f) calls f(args, mode, number) for every op in order, and returns a Status. `number` is the
  /// one scalar of the op that may change from launch to launch, and 0 where none does. The order of the ops follows
  /// from the tensors that they share now, and must hold after every move. Each op must be one kernel.
  template <class Walk>
  static Result<MovableGraph> create(const Context& context, Walk&& walk) {
    CF_TRY_ASSIGN(const Stream stream, make_stream());
    MovableGraph made(context);
    CF_TRY_ASSIGN(made.graph_, capture_nodes(stream.get(), [&] {
                    DataflowCapture capture(context.on_stream(stream.get()));
                    return walk([&](const auto& args, const LaunchMode& mode, std::int64_t number) -> Status {
                      CF_TRY_ASSIGN(LaunchList launches, made.prepared(args, mode));
                      CF_TRY(capture.add(args, launches, mode.early));
                      return made.keep(operands_of(args, number), std::move(launches), capture.last_nodes());
                    });
                  }));
    CF_TRY_ASSIGN(made.exec_, instantiate(made.graph_));
    return made;
  }

  /// Gives later launches the tensors and numbers of a walk over the same ops, of the same shapes and dtypes. False
  /// where an op needs another kernel or grid than the captured one. After false, and after a Status that is not ok,
  /// the graph must not be launched.
  template <class Walk>
  Result<bool> move(Walk&& walk) {
    std::size_t at = 0;
    bool fits = true;
    CF_TRY(walk([&](const auto& args, const LaunchMode& mode, std::int64_t number) -> Status {
      fits = fits && at < ops_.size();
      if (!fits) return {};
      Op& op = ops_[at++];
      Operands operands = operands_of(args, number);
      if (operands == op.operands) return {};
      CF_TRY_ASSIGN(LaunchList launches, prepared(args, mode));
      fits = launches.is_like(op.launches);
      if (!fits) return {};
      op.operands = std::move(operands);
      op.launches = std::move(launches);
      return op.launches.rewrite(0, exec_.get(), op.node);
    }));
    return fits && at == ops_.size();
  }

  Status launch(CUstream_st* stream) const;

 private:
  /// What an op's launch depends on, beside what stays as it was captured.
  struct Operands {
    std::vector<const void*> tensors;
    std::int64_t number = 0;
    bool operator==(const Operands&) const = default;
  };
  struct Op {
    Operands operands;
    LaunchList launches;
    CUgraphNode_st* node;
  };

  explicit MovableGraph(const Context& context) : context_(context) {}

  template <class Args>
  static Operands operands_of(const Args& args, std::int64_t number) {
    Operands operands{.tensors = {}, .number = number};
    Args::Op::tensors(Args::Op::dims(args), args,
                      [&](const TensorSpec&, const auto& view, const auto&) { operands.tensors.push_back(view.data); });
    return operands;
  }
  /// Prepares an op's launches. The addresses are trusted: the caller allocated the tensors.
  template <class Args>
  Result<LaunchList> prepared(const Args& args, const LaunchMode& mode) const {
    LaunchList launches(context_, {}, {.urgent = mode.urgent, .shared_percent = mode.shared_percent});
    launches.trust_addresses();
    CF_TRY(prepare(args, launches));
    return launches;
  }
  Status keep(Operands operands, LaunchList launches, std::span<CUgraphNode_st* const> nodes);

  Context context_;
  Graph graph_;  // its nodes name the kernels of exec_
  GraphExec exec_;
  std::vector<Op> ops_;
};

}  // namespace cf::cuda
