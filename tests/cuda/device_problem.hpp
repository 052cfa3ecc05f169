#pragma once
// A Problem on the device: the same blocks, guards and poison, copied over, with the op's arguments pointing there.
#include <cuda_runtime_api.h>

#include <span>
#include <utility>

#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/port/run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/op_problem.hpp"

namespace cf::test {

inline void require_cuda(cudaError_t e) {
  INFO(cudaGetErrorString(e));
  REQUIRE(e == cudaSuccess);
}

/// Device memory of its own, filled from the host or from other device memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::span<const std::byte> from) : bytes_(from.size()) {
    void* memory = nullptr;
    require_cuda(cudaMalloc(&memory, bytes_));
    data_ = static_cast<std::byte*>(memory);
    require_cuda(cudaMemcpy(data_, from.data(), bytes_, cudaMemcpyDefault));
    require_cuda(cudaDeviceSynchronize());  // the copy may still be under way, and other streams do not wait for it
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(DeviceBytes&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(o.bytes_) {}
  DeviceBytes& operator=(DeviceBytes&&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  void bring(std::span<const std::byte> from) {
    require_cuda(cudaMemcpy(data_, from.data(), bytes_, cudaMemcpyDefault));
  }
  void fetch(void* to) const { require_cuda(cudaMemcpy(to, data_, bytes_, cudaMemcpyDefault)); }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

template <class Op>
class DeviceProblem {
 public:
  explicit DeviceProblem(const Setup& s) : DeviceProblem(s, example_of<Op>(s)) {}
  DeviceProblem(const Setup& s, const std::pair<typename Op::Dims, typename Op::Args>& sizes)
      : host_(s, sizes), args_(host_.args()) {
    bring();
  }
  explicit DeviceProblem(const Problem<Op>& host) : host_(host), args_(host_.args()) { bring(); }
  DeviceProblem(const DeviceProblem&) = delete;
  DeviceProblem& operator=(const DeviceProblem&) = delete;

  const typename Op::Dims& dims() const { return host_.dims(); }
  typename Op::Args& args() { return args_; }
  std::vector<typename Problem<Op>::Block>& blocks() { return host_.blocks(); }
  /// The device memory behind each of blocks(), guards included.
  const std::vector<DeviceBytes>& memory() const { return device_; }

  /// Copies a host's blocks over those that a run has changed.
  void restore(Problem<Op>& host) {
    for (std::size_t i = 0; i < device_.size(); ++i) device_[i].bring(host.blocks()[i].memory);
    require_cuda(cudaDeviceSynchronize());
  }
  /// Runs the op to its end and brings every block back; the guards must be whole. Scratch memory begins as NaNs.
  Problem<Op>& run(cuda::Context& context, cuda::Scratch scratch = {}) {
    const Status s = scratch.data ? run_in(scratch, context) : cuda::run(args_, context);
    INFO(s.message());
    REQUIRE(s);
    return fetch();
  }
  Problem<Op>& fetch() {
    require_cuda(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < device_.size(); ++i) device_[i].fetch(host_.blocks()[i].memory.data());
    INFO("guard of " << host_.broken_guard());
    REQUIRE(host_.broken_guard().empty());
    return host_;
  }

 private:
  Status run_in(cuda::Scratch scratch, cuda::Context& context) {
    require_cuda(cudaMemsetAsync(scratch.data, 0xff, scratch.bytes, context.stream()));
    cuda::LaunchList launches(context, scratch);
    CF_TRY(cuda::prepare(args_, launches));
    return launches.submit(context.stream(), {.early = context.overlap()});
  }
  void bring() {
    for (auto& b : host_.blocks()) device_.emplace_back(b.memory);
    std::size_t i = 0;
    Op::tensors(host_.dims(), args_, [&](const TensorSpec&, auto& view, auto) {
      view.data = reinterpret_cast<decltype(view.data)>(device_[i++].data() + Problem<Op>::guard_bytes);
    });
    if constexpr (requires { args_.linear; }) pack_weight(args_.linear, host_.args().linear);
    if constexpr (requires { args_.linear2; }) pack_weight(args_.linear2, host_.args().linear2);
  }
  /// Puts a packed weight in device memory in place of a quantised one, which lies on the host.
  void pack_weight(LinearParams& linear, const LinearParams& host) {
    Result<cuda::Packed> packed = cuda::pack(host.weight, cuda::pack_hint(host_.args()));
    INFO(packed.status().message());
    REQUIRE(packed);
    if (!packed->storage) return;
    const auto* const block = static_cast<const std::byte*>(packed->storage.data());
    packed_.emplace_back(std::span(block, std::size_t(packed->storage.size_bytes())));
    auto& weight = std::get<PackedWeight>(packed->weight);
    weight.data.data = reinterpret_cast<const std::int32_t*>(packed_.back().data());
    linear.weight = weight;
  }

  Problem<Op> host_;
  typename Op::Args args_;
  std::vector<DeviceBytes> device_, packed_;
};

}  // namespace cf::test
