#include "apps/bench/device_model.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <numeric>
#include <optional>
#include <utility>

#include "cuda/ops/linear/cublaslt/library.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/serve/model.hpp"
#include "cuda/serve/ranked_model.hpp"
#include "cuda/step/classes.hpp"

namespace cf::apps {
namespace {

Result<cuda::Model::Options> model_options(const DeviceModelOptions& o) {
  cuda::Model::Options options{.slots = o.slots,
                               .capacity = o.capacity,
                               .chunk = o.chunk,
                               .impl = {},
                               .invariant = o.invariant,
                               .window = o.window,
                               .sinks = o.sinks,
                               .pages = o.pages,
                               .page_entries = o.page_entries};
  if (o.impl == "auto") return options;
  options.impl = cuda::impl_from_string(o.impl);
  if (!options.impl)
    return Status::error(Code::invalid_argument,
                         "--impl: expected auto, unfused, graph, split, layer or persistent, got '" + o.impl + "'");
  return options;
}

/// The first GPUs.
std::vector<int> devices_of(const DeviceModelOptions& o) {
  std::vector<int> devices(static_cast<std::size_t>(o.gpus));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

/// Names the impl that was asked for in what it does not take.
Status name_impl(const DeviceModelOptions& o, const Status& refused) {
  if (o.impl == "auto" || refused.code() != Code::unimplemented) return refused;
  return Status::error(refused.code(), "--impl " + o.impl + ": " + refused.message());
}

}  // namespace

Result<DeviceModelBytes> device_model_bytes(const ModelSpec& model, const ModelWeights& weights,
                                            const DeviceModelOptions& o) {
  CF_TRY_ASSIGN(const cuda::Model::Options options, model_options(o));
  cuda::ModelBytes bytes = cuda::Model::bytes(model, weights, options);
  if (o.gpus > 1) {
    CF_TRY_ASSIGN(bytes, cuda::RankedModel::bytes(o.gpus, model, weights, options));
  }
  return DeviceModelBytes{.weights = bytes.weights, .cache = bytes.cache, .workspace = bytes.workspace};
}

Result<DeviceModelPlan> plan_device_model(DeviceTimer& device, const ModelSpec& model, const ModelWeights& weights,
                                          const DeviceModelOptions& o) {
  CF_TRY_ASSIGN(const cuda::Model::Options options, model_options(o));
  CF_TRY_ASSIGN(const ModelSpec part, model.of_rank(0, o.gpus));
  CF_TRY_ASSIGN(const DeviceModelBytes bytes, device_model_bytes(model, weights, o));
  const cuda::Arch own = device.context().arch(), arch = o.invariant ? cuda::invariant_arch(own) : own;
  const cuda::Impl impl = options.impl ? *options.impl : cuda::Model::auto_impl(arch, part, weights, options);
  std::vector<WeightFormat> formats;  // of quantised weights
  for (const LayerWeights& layer : weights.layers)
    for_each_linear(model, layer, [&](const Site&, const LinearParams& l, const LinearSize&) {
      if (const WeightFormat format = format_of(l.weight); format.bits) formats.push_back(format);
    });
  const ModelShape& s = model.shape;
  return DeviceModelPlan{
      .bytes = bytes,
      .impl = std::string(to_string(impl)),
      .step_classes = cuda::to_string(cuda::step_classes(arch, formats)),
      .run_classes = cuda::to_string(cuda::attention_classes(arch, s.head_dim, s.num_heads / s.num_kv_heads)),
      .query_classes = cuda::to_string(cuda::query_classes(arch,
                                                           {.batch = 1,
                                                            .q_len = 1,
                                                            .heads = s.num_heads,
                                                            .kv_heads = s.num_kv_heads,
                                                            .head_dim = s.head_dim,
                                                            .capacity = o.capacity,
                                                            .max_kv_len = o.capacity,
                                                            .window = {.keys = model.traits.window}},
                                                           weights.embed_in.dtype))};
}

std::int64_t gpu_count() {
  int count = 0;
  return cuda::from_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount") ? count : 0;
}

Result<double> free_device_bytes(DeviceTimer&) {
  std::size_t free = 0, all = 0;
  CF_TRY(cuda::from_cuda(cudaMemGetInfo(&free, &all), "cudaMemGetInfo"));
  return double(free);
}

Status check_device_memory(DeviceTimer&, const std::string& name, const ModelSpec& model, const ModelWeights& weights,
                           const DeviceModelOptions& o) {
  CF_TRY_ASSIGN(const cuda::Model::Options options, model_options(o));
  if (o.gpus > 1) return cuda::RankedModel::check_memory(devices_of(o), name, model, weights, options);
  return cuda::Model::check_memory(name, model, weights, options);
}

Result<DeviceModel> open_device_model(DeviceTimer& device, const std::string& name, const ModelSpec& model,
                                      const ModelWeights& weights, const DeviceModelOptions& o,
                                      const LayerOf& layer_of) {
  CF_TRY_ASSIGN(const cuda::Model::Options options, model_options(o));
  if (o.gpus > 1) {
    Result<std::unique_ptr<cuda::RankedModel>> ranked =
        cuda::RankedModel::create(devices_of(o), name, model, weights, options, layer_of);
    if (!ranked) return name_impl(o, ranked.status());
    std::string impl(to_string((*ranked)->impl()));
    return DeviceModel{std::move(*ranked), std::move(impl)};
  }
  Result<std::unique_ptr<cuda::Model>> made =
      cuda::Model::create(device.context(), name, model, weights, options, layer_of);
  if (!made) return name_impl(o, made.status());
  std::string impl(to_string((*made)->impl()));
  return DeviceModel{std::move(*made), std::move(impl)};
}

std::string product_library() {
  const Result<std::string> library = cuda::gemm_library();
  return library ? *library : library.status().message();
}

std::vector<std::string> product_algorithms() {
  std::vector<std::string> all;
  for (const cuda::GemmAlgorithm& a : cuda::gemm_algorithms())
    all.push_back(
        fmt::format("{} tokens, {} -> {}, {}{}{}: algorithm {}, tile {}, stages {}, split-k {}, {} B of workspace",
                    a.tokens, a.in, a.out, to_string(a.dtype), a.output == a.dtype ? "" : " with float32 sums",
                    a.residual ? " with a residual" : "", a.id, a.tile, a.stages, a.split_k, a.workspace_bytes));
  return all;
}

}  // namespace cf::apps
