#pragma once
// Single ops on a GPU. The header holds no CUDA types: without the CUDA backend every call is refused.
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/families/site.hpp"
#include "core/model/shape.hpp"
#include "core/ops/all.hpp"
#include "core/status.hpp"
#include "cuda/ops/linear/pack/pack.hpp"

namespace cf::python {

/// Where an op is launched: a device, and a stream of it by CUDA's handle. 0 is the default stream.
struct DeviceStream {
  int device = 0;
  std::uintptr_t stream = 0;
};

/// Memory of the device that an op's launches may use while they run, from a multiple of 256 bytes on.
struct DeviceScratch {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
};

/// A block of a device's memory with an owner, for callers that have no library of their own to take it from.
class DeviceBlock {
 public:
  /// From a multiple of 256 bytes on. Code::out_of_memory where so much is not free.
  static Result<std::unique_ptr<DeviceBlock>> create(int device, std::size_t bytes);
  virtual ~DeviceBlock() = default;

  virtual std::uintptr_t address() const = 0;
  virtual std::size_t bytes() const = 0;
  /// Copies from and to as many bytes of the host's memory, after all that is on the default stream, and waits.
  virtual Status write(const void* from) = 0;
  virtual Status read(void* to) const = 0;
};

/// Every op on tensors of the device, whose addresses are trusted. run_on_device() launches and returns: it neither
/// waits nor takes memory, and a stream that is captured records the launches. It uses no more scratch memory than
/// device_scratch_bytes(), and does without where it is given none.
#define CF_OP(Op)                                         \
  std::size_t device_scratch_bytes(const ops::Op::Args&); \
  Status run_on_device(const ops::Op::Args&, const DeviceStream&, const DeviceScratch&);
#include "core/ops/ops.def"
#undef CF_OP

/// Packs a weight whose tensors lie on the device into host memory. Waits for the work on the stream, and refuses a
/// stream that is captured.
Result<cuda::Packed> pack_on_device(const GptqWeight& weight, const cuda::PackHint& hint, const DeviceStream& at);
/// Packs a layer's quantised Linear, whose tensors lie on the host, as a model's steps on a GPU read it.
Result<cuda::Packed> pack_for_steps(const GptqWeight& weight, const Site& site, const ModelSpec& model,
                                    const DeviceStream& at);
/// Copies a packed weight to the device's memory at `address`, where it then lies, and waits for the copy.
Status place_on_device(cuda::Packed& packed, std::uintptr_t address, const DeviceStream& at);

}  // namespace cf::python
