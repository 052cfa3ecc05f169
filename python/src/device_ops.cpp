#include "python/src/device_ops.hpp"

#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "cuda/model/linear_scratch.hpp"
#include "cuda/model/resident_weights.hpp"
#include "cuda/ops/linear/cublaslt/library.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/stream.hpp"
#include "python/src/device_context.hpp"
#include "python/src/device_guard.hpp"

namespace cf::python {
namespace {

template <class Args>
std::size_t scratch_bytes(const Args& a) {
  std::size_t bytes = 0;
  if constexpr (std::is_same_v<Args, ops::Linear::Args>) bytes = cuda::gemm_scratch_bytes(a);
  if constexpr (std::is_same_v<Args, ops::DecodeLayer::Args>) {
    bool is_quantised = false;
    for_each_linear(a.model, a.weights, [&](const Site&, const LinearParams& linear, const LinearSize&) {
      is_quantised |= !std::holds_alternative<DenseWeight>(linear.weight);
    });
    bytes = cuda::linear_scratch_bytes(a.model, a.t.hidden.dtype, a.t.hidden.shape[0], is_quantised);
  }
  return bytes && cuda::gemm_library() ? bytes : 0;
}

class OwnedBlock final : public DeviceBlock {
 public:
  OwnedBlock(const cuda::Context& context, cuda::DeviceMemory memory) : context_(context), memory_(std::move(memory)) {}
  OwnedBlock(const OwnedBlock&) = delete;
  OwnedBlock& operator=(const OwnedBlock&) = delete;
  ~OwnedBlock() override {
    const DeviceGuard guard(context_.device());
    memory_ = {};
  }

  std::uintptr_t address() const override { return reinterpret_cast<std::uintptr_t>(memory_.data()); }
  std::size_t bytes() const override { return memory_.bytes(); }
  Status write(const void* from) override {
    const DeviceGuard guard(context_.device());
    CF_TRY(guard.status());
    return cuda::copy_to_device(context_, memory_.data(), from, memory_.bytes());
  }
  Status read(void* to) const override {
    const DeviceGuard guard(context_.device());
    CF_TRY(guard.status());
    return cuda::copy_to_host(context_, to, memory_.data(), memory_.bytes());
  }

 private:
  cuda::Context context_;  // on the default stream
  cuda::DeviceMemory memory_;
};

}  // namespace

Result<std::unique_ptr<DeviceBlock>> DeviceBlock::create(int device, std::size_t bytes) {
  std::unique_ptr<DeviceBlock> block;
  CF_TRY(with_context({.device = device, .stream = 0}, [&](const cuda::Context& context) -> Status {
    CF_TRY_ASSIGN(cuda::DeviceMemory memory, cuda::DeviceMemory::create(context, bytes, "a block"));
    block = std::make_unique<OwnedBlock>(context, std::move(memory));
    return {};
  }));
  return block;
}

#define CF_OP(Op)                                                                                                \
  std::size_t device_scratch_bytes(const ops::Op::Args& args) { return scratch_bytes(args); }                    \
  Status run_on_device(const ops::Op::Args& args, const DeviceStream& at, const DeviceScratch& scratch) {        \
    return run_launches(at, scratch, [&](cuda::LaunchList& launches) { return cuda::prepare(args, launches); }); \
  }
#include "core/ops/ops.def"
#undef CF_OP

Result<cuda::Packed> pack_on_device(const GptqWeight& weight, const cuda::PackHint& hint, const DeviceStream& at) {
  cuda::Packed packed;
  CF_TRY(with_context(at, [&](const cuda::Context& context) -> Status {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    CF_TRY(cuda::from_cuda(cudaStreamIsCapturing(context.stream(), &capture), "cudaStreamIsCapturing"));
    if (capture != cudaStreamCaptureStatusNone)
      return Status::error(Code::device_error,
                           "the weight is not packed yet, which a CUDA graph cannot capture: expected a call with this "
                           "weight before the capture");
    CF_TRY_ASSIGN(packed, cuda::pack(weight, hint, context));
    return {};
  }));
  return packed;
}

Result<cuda::Packed> pack_for_steps(const GptqWeight& weight, const Site& site, const ModelSpec& model,
                                    const DeviceStream& at) {
  return pack_on_device(weight, cuda::pack_hint(site, model), at);
}

Status place_on_device(cuda::Packed& packed, std::uintptr_t address, const DeviceStream& at) {
  auto& weight = std::get<PackedWeight>(packed.weight);
  auto* const to = reinterpret_cast<std::int32_t*>(address);
  CF_TRY(with_context(at, [&](const cuda::Context& context) {
    return cuda::copy_to_device(context, to, weight.data.data, std::size_t(weight.data.bytes()));
  }));
  weight.data.data = to;
  packed.storage = {};
  return {};
}

}  // namespace cf::python
