#pragma once
// What the tests of resident stacks share.
#include <cuda_runtime_api.h>

#include <string>

#include "core/procedural.hpp"
#include "cuda/stack.hpp"
#include "device_check.hpp"

namespace cf::test {

inline void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s);
}

inline Tensor activations(DType dtype, Shape shape, const std::string& name) {
  Tensor t(dtype, std::move(shape));
  fill_procedural(t.data(), dtype, 0, t.size(), ProceduralKind::activation, 7, name);
  return t;
}

/// What lies behind a view on the device, once its work is done.
template <int Rank>
Tensor fetch(ConstAnyView<Rank> v) {
  require_cuda(cudaDeviceSynchronize());
  Tensor t(v.dtype, Shape(v.shape.begin(), v.shape.end()));
  require_cuda(cudaMemcpy(t.data(), v.data, std::size_t(t.size_bytes()), cudaMemcpyDeviceToHost));
  return t;
}

/// Steps one stack `steps` times as a graph of the caller's, captured once, and another launch by launch.
inline void replay_beside(cudaStream_t stream, int steps, cuda::Stack& captured, cuda::Impl captured_impl,
                          cuda::Stack& plain, cuda::Impl plain_impl) {
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  require_ok(captured.step(captured_impl));
  require_ok(captured.advance());
  cudaGraph_t graph = nullptr;
  require_cuda(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec = nullptr;
  require_cuda(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < steps; ++i) {
    require_cuda(cudaGraphLaunch(exec, stream));
    require_ok(plain.step(plain_impl));
    require_ok(plain.advance());
  }
  require_cuda(cudaStreamSynchronize(stream));
  require_cuda(cudaGraphExecDestroy(exec));
  require_cuda(cudaGraphDestroy(graph));
}

}  // namespace cf::test
