#pragma once
// Tensors on the device, for tests that hold their own.
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "core/procedural.hpp"
#include "core/tensor.hpp"
#include "tests/cuda/device_check.hpp"

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

/// A copy of what a view on the device shows, once all of the device's work is done.
template <int Rank>
Tensor fetch(ConstAnyView<Rank> v) {
  require_cuda(cudaDeviceSynchronize());
  Tensor t(v.dtype, Shape(v.shape.begin(), v.shape.end()));
  require_cuda(cudaMemcpy(t.data(), v.data, std::size_t(t.size_bytes()), cudaMemcpyDeviceToHost));
  return t;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), std::size_t(a.size_bytes())) == 0;
}

}  // namespace cf::test
