#pragma once
// Private to cuda/port and the Python package.
#include <vector>

#include "core/ops/decode_layer.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/port/movable.hpp"
#include "cuda/port/row_ops.hpp"
#include "cuda/port/run.hpp"

namespace cf::cuda {

/// Runs one layer for one token at a time. The caller has the cache's entries as rows of its own, too. A step is one
/// launch of a CUDA graph, in which an op waits only for the ops whose data it needs. A step has the bits of
/// prepare_layer()'s launches. Tensors may lie elsewhere at every step. A step that is on a stream does not need this
/// object any more. Not shared between threads.
class RowSteps {
 public:
  /// Works on the context's device, with its launch plans. The context is copied; its stream is not used.
  explicit RowSteps(const Context& context) : context_(context) {}

  /// Puts a step onto the stream, which must not be captured. The addresses are trusted. All steps have the model, the
  /// shapes and the dtypes of the first one; kv_len must hold rows.last + 1, as max_kv_len must be. Refuses rows that
  /// are no entries of the cache yet. A graph is captured when a plan of attention is first met, and kept: a step that
  /// finds its own takes no memory and waits for nothing.
  Status step(const ops::DecodeLayer::Args& a, const TokenRows& rows, CUstream_st* stream);
  /// How many graphs are kept.
  std::size_t graphs() const { return captured_.size(); }

 private:
  /// A graph for one plan of attention. All other plans of a step follow from what all steps have in common.
  struct Captured {
    AttentionPlan plan;
    RowOps ops;
    MovableGraph graph;
  };
  Status capture(const AttentionPlan& plan, const ops::DecodeLayer::Args& a, const TokenRows& rows);

  Context context_;
  std::vector<Captured> captured_;
};

}  // namespace cf::cuda
