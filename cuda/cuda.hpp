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
  /// Code::device_error with one line that says why there is none: no driver, no such device, another compute
  /// capability.
  static Result<Context> create(int device = 0, CUstream_st* stream = nullptr);

  int device() const { return device_; }
  CUstream_st* stream() const { return stream_; }
  const Arch& arch() const { return arch_; }
  /// Makes plans as for another device, to try them on this one.
  void set_plan_arch(const Arch& arch) { arch_ = arch; }
  /// Whether a kernel may start before its predecessor is done (programmatic dependent launch). Every op then waits
  /// before it touches its activations, but reads its weights ahead: they must not be written by work on the stream
  /// that is still running.
  bool overlap() const { return overlap_; }
  void set_overlap(bool on) { overlap_ = on; }
  /// Whether calls are checked and nothing is launched, to learn that a sequence of them will run before its first
  /// does.
  bool dry_run() const { return dry_run_; }
  void set_dry_run(bool on) { dry_run_ = on; }
  /// Whether a kernel's blocks go before those of kernels that wait for the same SMs (the greatest stream priority).
  bool urgent() const { return urgent_; }
  void set_urgent(bool on) { urgent_ = on; }
  /// Whether kernels run side by side: each then asks for the same division of an SM's memory into L1 and shared, since
  /// an SM that divides it otherwise has to empty before a kernel's first block can join others there.
  bool side_by_side() const { return side_by_side_; }
  void set_side_by_side(bool on) { side_by_side_ = on; }

 private:
  int device_ = 0;
  CUstream_st* stream_ = nullptr;
  Arch arch_ = kH200;
  bool overlap_ = false;
  bool dry_run_ = false;
  bool urgent_ = false;
  bool side_by_side_ = false;
};

/// Every op, checked before anything is launched: null, misaligned or host pointers, shapes and dtypes that do not
/// match, scalars out of bounds; Code::unimplemented with the reason where there is no kernel. Values in device memory
/// (kv_len, positions, ids) cannot be looked at before a launch: the kernels read nothing out of bounds for them, and
/// what depends on them comes out as NaN.
///   all        sizes of rows a multiple of 8
///   layernorm  hidden up to 32768
///   linear     16-bit activations with weights of the same dtype, or with GptqTiles; float32 activations with dense
///              weights of any dtype. A GptqWeight is repacked by repack_gptq() first
///   attention  head_dim up to 256
#define CF_OP(Op) Status run(const ops::Op::Args&, Context&);
#include "core/ops/ops.def"
#undef CF_OP

}  // namespace cf::cuda
