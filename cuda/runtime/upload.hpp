#pragma once
#include <array>
#include <cstddef>

#include "core/status.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/pinned.hpp"
#include "cuda/runtime/stream.hpp"

namespace cf::cuda {

/// Copies much from the host's memory, mapped files among it, to a device. Threads fill one pinned buffer while the
/// device takes the other: from memory that is not pinned the driver copies with one thread.
class Upload {
 public:
  /// Copies after all work that is on the context's stream.
  static Result<Upload> create(const Context& context);
  /// Copies `bytes` bytes. The source is read when the call returns; the device has them after finish().
  Status add(void* device, const void* from, std::size_t bytes);
  /// Waits for the copies to arrive.
  Status finish();

 private:
  struct Buffer {
    Pinned<std::byte> memory;
    Event taken;  // when the device has what was put into it
  };
  explicit Upload(const Context& context) : context_(context) {}
  /// Goes on with the other buffer.
  Status turn();

  Context context_;
  std::array<Buffer, 2> buffers_;
  std::size_t buffer_ = 0, used_ = 0;
};

}  // namespace cf::cuda
