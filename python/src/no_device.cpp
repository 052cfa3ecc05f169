// The GPU of a build without the CUDA backend: each call is refused.
#include "python/src/device.hpp"
#include "python/src/device_ops.hpp"
#include "python/src/port/port_steps.hpp"

namespace cf::python {
namespace {

Status no_cuda() {
  return Status::error(Code::unimplemented,
                       "device: this build of cf_ops has no CUDA backend, expected one that was made where nvcc is: "
                       "put nvcc on PATH, then pip install .");
}

}  // namespace

bool has_cuda() { return false; }
Result<std::pair<std::string, std::string>> cuda_versions() { return no_cuda(); }
std::string cublaslt() { return no_cuda().message(); }
Status check_device(int) { return no_cuda(); }
Status on_device(int, const std::function<Status()>&) { return no_cuda(); }
Result<DeviceInfo> device_info(int) { return no_cuda(); }
Result<DeviceModel> make_device_model(const std::string&, const ModelSpec&, const ModelWeights&,
                                      const DeviceModelOptions&) {
  return no_cuda();
}

Result<std::unique_ptr<DeviceBlock>> DeviceBlock::create(int, std::size_t) { return no_cuda(); }

#define CF_OP(Op)                                                      \
  std::size_t device_scratch_bytes(const ops::Op::Args&) { return 0; } \
  Status run_on_device(const ops::Op::Args&, const DeviceStream&, const DeviceScratch&) { return no_cuda(); }
#include "core/ops/ops.def"
#undef CF_OP
Status run_on_device(const RowsLayer&, const DeviceStream&) { return no_cuda(); }

struct DeviceSteps::State {};
DeviceSteps::DeviceSteps() = default;
DeviceSteps::~DeviceSteps() = default;
std::size_t DeviceSteps::graphs() const { return 0; }
Status DeviceSteps::run(const RowsLayer&, const DeviceStream&) { return no_cuda(); }

Result<cuda::Packed> pack_on_device(const GptqWeight&, const cuda::PackHint&, const DeviceStream&) { return no_cuda(); }
Result<cuda::Packed> pack_for_steps(const GptqWeight&, const Site&, const ModelSpec&, const DeviceStream&) {
  return no_cuda();
}
Status place_on_device(cuda::Packed&, std::uintptr_t, const DeviceStream&) { return no_cuda(); }

}  // namespace cf::python
