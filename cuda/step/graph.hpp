#pragma once
// CUDA graphs whose edges follow from what the ops read and write. Private to cuda and the programs' benchmarks.
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cuda/ops/run.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/stream.hpp"
#include "cuda/step/dataflow.hpp"

namespace cf::cuda {

/// Puts ops onto a stream that is being captured. An op waits only for the ops whose data it needs, so that others may
/// run at the same time.
class DataflowCapture {
 public:
  /// The context's stream is being captured and was empty. Ops that use the scratch memory never run at the same time.
  explicit DataflowCapture(const Context& context, Scratch scratch = {}) : context_(context), scratch_(scratch) {}

  const Arch& arch() const { return context_.arch(); }
  /// An empty list for an op's launches.
  LaunchList launches(const LaunchMode& mode) const { return LaunchList(context_, scratch_, mode); }

  /// Adds an op: its node waits for the ops whose outputs it reads, and for those that read or wrote what it
  /// overwrites. With `early` its kernel may start before these are done, but a library's call never does.
  template <class Args>
  Status run(const Args& args, const LaunchMode& mode) {
    LaunchList launches = this->launches(mode);
    CF_TRY(prepare(args, launches));
    return add(args, launches, mode.early);
  }
  /// The same with the launches that the op has prepared.
  template <class Args>
  Status add(const Args& args, const LaunchList& launches, bool early) {
    using Op = typename Args::Op;
    std::vector<const void*> reads, writes;
    Op::tensors(Op::dims(args), args, [&](const TensorSpec& t, const auto& view, const auto&) {
      if (is_read(t.role) || is_index(t.role)) reads.push_back(view.data);
      if (is_written(t.role)) writes.push_back(view.data);
    });
    return add(reads, writes, launches, early);
  }
  /// Adds launches that read and write the tensors at these addresses, and the scratch memory where the list uses it.
  Status add(std::span<const void* const> reads, std::span<const void* const> writes, const LaunchList& launches,
             bool early);
  /// The nodes at the end of the op that was added last. An op of one launch has one.
  const std::vector<CUgraphNode_st*>& last_nodes() const { return nodes_.back(); }

 private:
  Context context_;
  Scratch scratch_;
  Dataflow flow_;
  std::vector<std::vector<CUgraphNode_st*>> nodes_;  // the last nodes of each op
};

/// Captures a graph of the ops that `record` adds to the DataflowCapture it is given. Nothing runs. The context gives
/// the launch plans. Its stream is not used, since a default stream cannot be captured.
template <class Record>
Result<GraphExec> capture_dataflow(const Context& context, Record&& record, Scratch scratch = {}) {
  CF_TRY_ASSIGN(Stream stream, make_stream());
  return capture(stream.get(), [&] {
    DataflowCapture graph(context.on_stream(stream.get()), scratch);
    return record(graph);
  });
}

/// Captures a graph of any walk over ops: `walk(add)` calls add(site, args) for each of its ops in order, as
/// for_each_site() does, and returns a Status. A kernel may start before the kernels whose data it needs are done.
template <class Walk>
Result<GraphExec> capture_walk(const Context& context, Walk&& walk, Scratch scratch = {}) {
  return capture_dataflow(
      context,
      [&](DataflowCapture& graph) {
        return walk([&](const auto&, const auto& args) { return graph.run(args, {.early = true}); });
      },
      scratch);
}

}  // namespace cf::cuda
