#include "python/src/device.hpp"

#include "cuda/ops/linear/cublaslt/library.hpp"
#include "cuda/runtime/stream.hpp"
#include "cuda/serve/model.hpp"
#include "cuda/serve/ranked_model.hpp"
#include "python/src/device_guard.hpp"

namespace cf::python {
namespace {

using cuda::from_cuda;

std::string version(int encoded) { return std::to_string(encoded / 1000) + "." + std::to_string(encoded % 1000 / 10); }

Result<cudaDeviceProp> properties_of(int device) {
  int count = 0;
  CF_TRY(from_cuda(cudaGetDeviceCount(&count), "no CUDA device"));
  if (device < 0 || device >= count)
    return Status::error(Code::device_error,
                         "no CUDA device " + std::to_string(device) + ", there are " + std::to_string(count));
  cudaDeviceProp properties;
  CF_TRY(from_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties"));
  CF_TRY(cuda::arch_of(properties, device).status());
  return properties;
}

}  // namespace

static_assert(kWeightAlignment == cuda::ResidentWeights::kAlignment);

bool has_cuda() { return true; }

Result<std::pair<std::string, std::string>> cuda_versions() {
  int driver = 0, runtime = 0;
  CF_TRY(from_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion"));
  CF_TRY(from_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion"));
  return std::pair(version(driver), version(runtime));
}

std::string cublaslt() {
  const Result<std::string> found = cuda::gemm_library();
  return found ? *found : found.status().message();
}

Status check_device(int device) {
  const cuda::RelaxedCapture relaxed;  // an op's first call may be captured
  return properties_of(device).status();
}

Status on_device(int device, const std::function<Status()>& f) {
  const DeviceGuard guard(device);
  CF_TRY(guard.status());
  return f();
}

Result<DeviceInfo> device_info(int device) {
  CF_TRY_ASSIGN(const cudaDeviceProp p, properties_of(device));
  const DeviceGuard guard(device);
  CF_TRY(guard.status());
  std::size_t free = 0, all = 0;
  CF_TRY(from_cuda(cudaMemGetInfo(&free, &all), "cudaMemGetInfo"));
  return DeviceInfo{.name = p.name,
                    .compute_capability = 10 * p.major + p.minor,
                    .memory_bytes = double(all),
                    .free_bytes = double(free)};
}

Result<DeviceModel> make_device_model(const std::string& name, const ModelSpec& model, const ModelWeights& weights,
                                      const DeviceModelOptions& o) {
  cuda::Model::Options options{.slots = o.slots,
                               .capacity = o.capacity,
                               .chunk = o.chunk,
                               .impl = {},
                               .in_place = o.in_place,
                               .invariant = o.invariant,
                               .window = o.window,
                               .sinks = o.sinks,
                               .pages = o.pages,
                               .page_entries = o.page_entries};
  if (o.impl != "auto") {
    options.impl = cuda::impl_from_string(o.impl);
    if (!options.impl) {
      std::string names;
      for (cuda::Impl impl : cuda::kImpls) names.append(", ").append(to_string(impl));
      return Status::error(Code::invalid_argument, "impl: expected auto" + names + ", got '" + o.impl + "'");
    }
  }
  CF_TRY(check_device(o.device));
  const DeviceGuard guard(o.device);
  CF_TRY(guard.status());
  const auto described = [&](auto made) -> Result<DeviceModel> {
    if (!made) {
      if (!options.impl || made.status().code() != Code::unimplemented) return made.status();
      return Status::error(made.status().code(), "impl '" + o.impl + "': " + made.status().message());
    }
    DeviceModel d{.runner = nullptr, .impl = std::string(to_string((*made)->impl()))};
    const cuda::ModelBytes& bytes = (*made)->bytes();
    d.weights_bytes = std::int64_t(bytes.weights);
    d.cache_bytes = std::int64_t(bytes.cache);
    d.workspace_bytes = std::int64_t(bytes.workspace);
    d.runner = std::move(*made);
    return d;
  };
  if (o.devices.size() > 1) return described(cuda::RankedModel::create(o.devices, name, model, weights, options));
  CF_TRY_ASSIGN(const cuda::Context context, cuda::Context::create(o.device));
  return described(cuda::Model::create(context, name, model, weights, options));
}

}  // namespace cf::python
