#pragma once
// A Problem on the device: the same blocks, guards and poison, copied over, with the op's arguments pointing there.
#include <cuda_runtime_api.h>

#include "catch.hpp"
#include "cuda/cuda.hpp"
#include "op_problem.hpp"

namespace cf::test {

inline void require_cuda(cudaError_t e) {
  INFO(cudaGetErrorString(e));
  REQUIRE(e == cudaSuccess);
}

template <class Op>
class DeviceProblem {
 public:
  explicit DeviceProblem(const Setup& s) : DeviceProblem(s, Op::example(s.model, s.load)) {}
  DeviceProblem(const Setup& s, const std::pair<typename Op::Dims, typename Op::Args>& sizes)
      : host_(s, sizes), args_(host_.args()) {
    for (auto& b : host_.blocks()) {
      void* memory = nullptr;
      require_cuda(cudaMalloc(&memory, b.memory.size()));
      device_.push_back(static_cast<std::byte*>(memory));
      require_cuda(cudaMemcpy(memory, b.memory.data(), b.memory.size(), cudaMemcpyHostToDevice));
    }
    std::size_t i = 0;
    Op::tensors(host_.dims(), args_, [&](Role, std::string_view, auto& view, auto, bool = false) {
      view.data = reinterpret_cast<decltype(view.data)>(device_[i++] + Problem<Op>::guard_bytes);
    });
  }
  ~DeviceProblem() {
    for (std::byte* p : device_) cudaFree(p);
  }
  DeviceProblem(const DeviceProblem&) = delete;
  DeviceProblem& operator=(const DeviceProblem&) = delete;

  typename Op::Args& args() { return args_; }

  /// Runs the op to its end and brings every block back; the guards must be whole.
  Problem<Op>& run(cuda::Context& context) {
    const Status s = cuda::run(args_, context);
    INFO(s.message());
    REQUIRE(s);
    require_cuda(cudaDeviceSynchronize());
    return fetch();
  }
  Problem<Op>& fetch() {
    for (std::size_t i = 0; i < device_.size(); ++i) {
      auto& memory = host_.blocks()[i].memory;
      require_cuda(cudaMemcpy(memory.data(), device_[i], memory.size(), cudaMemcpyDeviceToHost));
    }
    INFO("guard of " << host_.broken_guard());
    REQUIRE(host_.broken_guard().empty());
    return host_;
  }

 private:
  Problem<Op> host_;
  typename Op::Args args_;
  std::vector<std::byte*> device_;
};

}  // namespace cf::test
