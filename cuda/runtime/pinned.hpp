#pragma once
// Memory of the host that a device copies from and to without waiting. Private to cuda.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "cuda/runtime/check.hpp"

namespace cf::cuda {

struct FreePinned {
  void operator()(void* p) const { (void)cudaFreeHost(p); }
};
template <class T>
using Pinned = std::unique_ptr<T[], FreePinned>;

template <class T>
Result<Pinned<T>> make_pinned(std::size_t count) {
  void* data = nullptr;
  CF_TRY(from_cuda(cudaMallocHost(&data, count * sizeof(T)), "cudaMallocHost"));
  return Pinned<T>(static_cast<T*>(data));
}

}  // namespace cf::cuda
