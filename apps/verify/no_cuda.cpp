// What needs a GPU, in a build without the CUDA backend: every call is an error.
#include "apps/verify/device_ops.hpp"
#include "apps/verify/device_runner.hpp"

namespace cf::apps {

Status no_cuda() {
  return Status::error(Code::unimplemented, "this build has no CUDA support: no nvcc was found when it was configured");
}

struct DeviceOps::State {};
DeviceOps::DeviceOps(DeviceOps&&) noexcept = default;
DeviceOps& DeviceOps::operator=(DeviceOps&&) noexcept = default;
DeviceOps::~DeviceOps() = default;
Result<DeviceOps> DeviceOps::create(int) { return no_cuda(); }
#define CF_OP(Op) \
  Status DeviceOps::run(const ops::Op::Args&) { return no_cuda(); }
#include "core/ops/ops.def"
#undef CF_OP
Status DeviceOps::run_layer(const ops::DecodeLayer::Args&) { return no_cuda(); }
Result<std::unique_ptr<ModelRunner>> make_device_runner(const std::string&, const ModelSpec&, const ModelWeights&,
                                                        std::int64_t, std::int64_t) {
  return no_cuda();
}

}  // namespace cf::apps
