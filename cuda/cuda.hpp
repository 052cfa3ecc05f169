#pragma once
#include "core/ops/all.hpp"
#include "core/status.hpp"
#include "cuda/arch.hpp"

struct CUstream_st;  // cudaStream_t is a pointer to it

/// The CUDA backend. Views point to device memory; calls are asynchronous on the context's stream.
namespace cf::cuda {

/// A device and a stream to run on. Not shared between threads; any number may exist side by side.
class Context {
 public:
  /// Takes the device and checks that this build holds code for it. `stream` may be null, the default stream.
  /// Code::device_error with one line that says why there is none: no driver, no such device, another compute capability.
  static Result<Context> create(int device = 0, CUstream_st* stream = nullptr);

  int device() const { return device_; }
  CUstream_st* stream() const { return stream_; }
  const Arch& arch() const { return arch_; }
  /// Makes plans as for another device, to try them on this one.
  void set_plan_arch(const Arch& arch) { arch_ = arch; }

 private:
  int device_ = 0;
  CUstream_st* stream_ = nullptr;
  Arch arch_ = kH200;
};

/// y = LayerNorm(x), for float16, bfloat16 and float32 activations, hidden a multiple of 8 up to 32768.
Status run(const ops::LayerNorm::Args&, Context&);

}  // namespace cf::cuda
