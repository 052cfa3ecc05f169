#pragma once
#include "core/status.hpp"
#include "cuda/runtime/arch.hpp"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace cf::cuda {

struct Peers;  // cuda/comm/peers.hpp

/// A device and a stream to run on. Not shared between threads; any number may exist side by side.
class Context {
 public:
  /// Takes the device and checks that this build holds code for it. `stream` may be null, the default stream.
  /// Code::device_error with one line that says why there is none: no driver, no such device, another compute
  /// capability.
  static Result<Context> create(int device = 0, CUstream_st* stream = nullptr);

  int device() const { return device_; }
  CUstream_st* stream() const { return stream_; }
  /// The same device and launch plans with another stream.
  Context on_stream(CUstream_st* stream) const {
    Context other = *this;
    other.stream_ = stream;
    return other;
  }
  const Arch& arch() const { return arch_; }
  /// Makes plans as for another device, to try them on this one.
  void set_plan_arch(const Arch& arch) { arch_ = arch; }
  /// What kernels know of the other ranks, where the context is that of a rank which shares a model; null where it is
  /// none. A Communicator owns it.
  const Peers* peers() const { return peers_; }
  void set_peers(const Peers* peers) { peers_ = peers; }
  /// Whether a kernel may start before its predecessor is done (programmatic dependent launch). Every op then waits
  /// before it touches its activations, but reads its weights ahead: they must not be written by work on the stream
  /// that is still running.
  bool overlap() const { return overlap_; }
  void set_overlap(bool on) { overlap_ = on; }

 private:
  int device_ = 0;
  CUstream_st* stream_ = nullptr;
  Arch arch_ = kH200;
  bool overlap_ = false;
  const Peers* peers_ = nullptr;
};

}  // namespace cf::cuda
