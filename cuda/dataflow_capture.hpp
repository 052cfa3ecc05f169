#pragma once
// Graphs whose edges are the data's. Private to cuda and the programs' benchmarks.
#include <span>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/dataflow.hpp"

namespace cf::cuda {

/// Puts ops onto a stream that is being captured, each behind those alone whose data it needs, so that the others may
/// run at the same time.
class DataflowCapture {
 public:
  /// The context's stream is being captured and was empty.
  explicit DataflowCapture(const Context& context) : context_(context) {}

  const Arch& arch() const { return context_.arch(); }

  /// Whether the ops that follow run side by side, as in a context that says so.
  void set_side_by_side(bool on) { context_.set_side_by_side(on); }

  /// `early` lets the op's kernel start before those that it waits for are done, as in an overlapping context; `urgent`
  /// is the context's, too.
  template <class Args>
  Status run(const Args& args, bool urgent, bool early) {
    using Op = typename Args::Op;
    std::vector<const void*> reads, writes;
    Op::tensors(Op::dims(args), args, [&](Role role, std::string_view, const auto& view, const auto&, bool = false) {
      if (role == Role::input) reads.push_back(view.data);
      if (role == Role::output || role == Role::state) writes.push_back(view.data);
    });
    return run(reads, writes, urgent, early, [&](Context& context) { return cuda::run(args, context); });
  }
  /// The same for what `launch` puts onto its context's stream, which reads and writes what is named by address.
  template <class Launch>
  Status run(std::span<const void* const> reads, std::span<const void* const> writes, bool urgent, bool early,
             Launch&& launch) {
    CF_TRY(begin(flow_.add(reads, writes), early));
    context_.set_urgent(urgent);
    CF_TRY(launch(context_));
    return end();
  }

 private:
  Status begin(const std::vector<int>& after, bool early);
  Status end();

  Context context_;
  Dataflow flow_;
  std::vector<CUgraphNode_st*> nodes_;  // each op's last
};

}  // namespace cf::cuda
