#pragma once
// What is asked of every call before its launches are added to a list. Private to cuda.
#include <cuda_runtime_api.h>

#include "core/contract.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {

/// A CUDA error as a Status: ok, Code::out_of_memory or Code::device_error, with CUDA's own words. CUDA's error is
/// cleared, so that the next call starts clean.
Status from_cuda(cudaError_t error, std::string_view what, SourceLocation at = SourceLocation::current());

/// The limits of a device as its properties give them. Refuses a compute capability that there are no kernels for.
Result<Arch> arch_of(const cudaDeviceProp& properties, int device);

/// Refuses, by name, tensors outside the device's memory unless addresses are trusted, tensors that are not aligned to
/// `alignment_bytes`, and float64 weights. The kernels of ops read tables and indices element by element: there these
/// may lie at any element.
class DeviceCheck {
 public:
  DeviceCheck(std::string_view op, int device, std::size_t alignment_bytes = 16)
      : op_(op), device_(device), alignment_bytes_(alignment_bytes) {}
  DeviceCheck(std::string_view op, const LaunchList& launches) : DeviceCheck(op, launches.device()) {
    trusts_addresses_ = launches.trusts_addresses();
    is_op_ = true;
  }

  template <class V, class Shape>
  void operator()(const TensorSpec& t, const V& v, const Shape&) {
    look(t, v.data, v.dtype);
  }
  const Status& status() const { return status_; }

 private:
  void look(const TensorSpec& t, const void* data, DType dtype);
  Status examine(const TensorSpec& t, const void* data, DType dtype) const;

  std::string_view op_;
  int device_;
  std::size_t alignment_bytes_;
  bool trusts_addresses_ = false, is_op_ = false;
  Status status_;
};

/// Checks where the tensors of a call lie, which the op's check() took.
template <class Args>
Status check_addresses(const Args& args, const LaunchList& launches) {
  using Op = typename Args::Op;
  DeviceCheck check(Op::name, launches);
  Op::tensors(Op::dims(args), args, check);
  return check.status();
}

/// Checks a call by its contract, and then where its tensors lie.
template <class Args>
Status check_call(const Args& args, const LaunchList& launches) {
  CF_TRY(Args::Op::check(args));
  return check_addresses(args, launches);
}

}  // namespace cf::cuda
