#pragma once
// Whole models on a GPU. The header holds no CUDA types: without the CUDA backend every call but the first is refused.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/model/runner.hpp"
#include "core/model/weights.hpp"
#include "core/status.hpp"

namespace cf::python {

/// Weights in place begin at a multiple of so many bytes.
inline constexpr std::int64_t kWeightAlignment = 256;

/// Whether this build has the CUDA backend.
bool has_cuda();

/// A GPU and what CUDA says of it.
struct DeviceInfo {
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  double memory_bytes = 0, free_bytes = 0;
};

/// The newest CUDA that the driver runs, "13.0", and the CUDA that this build links.
Result<std::pair<std::string, std::string>> cuda_versions();
/// How cuBLASLt was found, or why it was not: its products are left to the library's own kernels then.
std::string cublaslt();
/// Refuses a device that is not there or that this build has no kernels for. Takes no memory of the device.
Status check_device(int device);
Result<DeviceInfo> device_info(int device);

/// Runs f() with a device as the calling thread's, and gives the thread back the one that it had: the thread may be
/// another library's, such as torch's.
Status on_device(int device, const std::function<Status()>& f);

/// How a GPU runs a model.
struct DeviceModelOptions {
  int device = 0;
  std::vector<int> devices{};  // that share the model, `device` first; `device` alone where it is empty
  std::int64_t slots = 1, capacity = 2048, chunk = 512;
  std::string impl = "auto";  // of steps: the name of a cuda::Impl, or auto for the fastest that takes them
  bool in_place = false;      // whether the weights lie on the device and are read there, without a copy
  // As cuda::Model::Options has them.
  bool invariant = false;
  std::int64_t window = 0, sinks = 0;
  std::int64_t pages = 0, page_entries = 64;
};

/// A model on a GPU with what it took there. The runner works, and ends, on_device().
struct DeviceModel {
  std::unique_ptr<ModelRunner> runner;
  std::string impl;  // of steps
  std::int64_t weights_bytes = 0, cache_bytes = 0, workspace_bytes = 0;
};

/// Copies weights, which may lie on the host or on a device, to the device, or reads them there in place, and takes
/// memory for cache and activations. Weights in place must outlive the model. Refuses what
/// cuda::Model::create() and cuda::RankedModel::create() refuse, and the name of no impl.
Result<DeviceModel> make_device_model(const std::string& name, const ModelSpec& model, const ModelWeights& weights,
                                      const DeviceModelOptions& options);

}  // namespace cf::python
