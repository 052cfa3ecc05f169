#pragma once
// What the tests of sessions share.
#include <cuda_runtime_api.h>

#include <string>

#include "core/procedural.hpp"
#include "cuda/model/session.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace cf::test {

/// Steps one session `steps` times as a graph of the caller's, captured once, and another launch by launch.
inline void replay_beside(cudaStream_t stream, int steps, cuda::Session& captured, cuda::Impl captured_impl,
                          cuda::Session& plain, cuda::Impl plain_impl) {
  require_ok(captured.prepare(captured_impl));
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  require_ok(captured.step(captured_impl));
  require_ok(captured.extend());
  cudaGraph_t graph = nullptr;
  require_cuda(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec = nullptr;
  require_cuda(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < steps; ++i) {
    require_cuda(cudaGraphLaunch(exec, stream));
    require_ok(plain.step(plain_impl));
    require_ok(plain.extend());
  }
  require_cuda(cudaStreamSynchronize(stream));
  require_cuda(cudaGraphExecDestroy(exec));
  require_cuda(cudaGraphDestroy(graph));
}

}  // namespace cf::test
