#pragma once
// Streams, events, graphs and modes of capture with an owner. Private to cuda and the programs' timer.
#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "cuda/runtime/check.hpp"

namespace cf::cuda {

struct Destroy {
  void operator()(CUstream_st* s) const { (void)cudaStreamDestroy(s); }
  void operator()(CUevent_st* e) const { (void)cudaEventDestroy(e); }
  void operator()(CUgraph_st* g) const { (void)cudaGraphDestroy(g); }
  void operator()(CUgraphExec_st* g) const { (void)cudaGraphExecDestroy(g); }
};
using Stream = std::unique_ptr<CUstream_st, Destroy>;
using Event = std::unique_ptr<CUevent_st, Destroy>;
using Graph = std::unique_ptr<CUgraph_st, Destroy>;
using GraphExec = std::unique_ptr<CUgraphExec_st, Destroy>;

/// A stream that has no order with the default stream.
inline Result<Stream> make_stream() {
  cudaStream_t stream = nullptr;
  CF_TRY(from_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  return Stream(stream);
}

/// For its lifetime, lets this thread make calls that a capture would refuse although they put nothing onto a stream: a
/// library may take memory and load kernels at their first use.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then what it was before
};

/// Captures what `enqueue` puts onto the stream, which must not be the default stream. Nothing runs.
template <class Enqueue>
Result<Graph> capture_nodes(CUstream_st* stream, Enqueue&& enqueue) {
  CF_TRY(from_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"));
  // A capture must end, whatever happened within.
  const Status enqueued = enqueue();
  cudaGraph_t captured = nullptr;
  const Status ended = from_cuda(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  Graph graph(captured);
  if (!enqueued) return enqueued;
  if (!ended) return ended;
  return graph;
}

/// A graph that can be launched. Its kernels keep their priorities.
inline Result<GraphExec> instantiate(const Graph& graph) {
  cudaGraphExec_t exec = nullptr;
  CF_TRY(from_cuda(cudaGraphInstantiate(&exec, graph.get(), cudaGraphInstantiateFlagUseNodePriority),
                   "cudaGraphInstantiate"));
  return GraphExec(exec);
}

/// Captures what `enqueue` puts onto the stream, as a graph that can be launched.
template <class Enqueue>
Result<GraphExec> capture(CUstream_st* stream, Enqueue&& enqueue) {
  CF_TRY_ASSIGN(const Graph graph, capture_nodes(stream, std::forward<Enqueue>(enqueue)));
  return instantiate(graph);
}

}  // namespace cf::cuda
