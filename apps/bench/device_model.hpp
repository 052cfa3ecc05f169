#pragma once
// Whole models on a GPU. Like device_timer.hpp this header holds no CUDA types, and without the CUDA backend every call
// is an error.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/bench/device_timer.hpp"
#include "core/model/decoder.hpp"
#include "core/model/weights.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// How a GPU runs a model.
struct DeviceModelOptions {
  std::int64_t slots = 1, capacity = 2048, chunk = 2048;
  std::int64_t gpus = 1;      // that share the model: the first ones
  std::string impl = "auto";  // of steps: the name of a cuda::Impl, or auto for the fastest that takes them
  // As cuda::Model::Options has them.
  bool invariant = false;
  std::int64_t window = 0, sinks = 0;
  std::int64_t pages = 0, page_entries = 64;
};

/// What a model takes of each GPU.
struct DeviceModelBytes {
  double weights = 0, cache = 0, workspace = 0;
  double total() const { return weights + cache + workspace; }
};

/// What a model takes of each of `options.gpus` GPUs, which need not be there: what open_device_model() takes there. It
/// reads the weights' formats, dtypes and shapes alone. Refuses sizes that so many GPUs cannot share, by name.
Result<DeviceModelBytes> device_model_bytes(const ModelSpec& model, const ModelWeights& weights,
                                            const DeviceModelOptions& options);

/// What a model takes of each GPU, and how its steps run.
struct DeviceModelPlan {
  DeviceModelBytes bytes;
  std::string impl;
  /// The tokens of steps, and of runs, in ranges within which a row has the same bits: "1 to 8, 9 to 128, 129 or more".
  /// Of steps for all but attention, of runs for attention, and of the queries of a launch where runs are short.
  std::string step_classes, run_classes, query_classes;
};

/// Plans a model on the timer's device, or on several like it. It reads the weights' formats, dtypes and shapes alone.
/// Refuses sizes that several GPUs cannot share.
Result<DeviceModelPlan> plan_device_model(DeviceTimer& device, const ModelSpec& model, const ModelWeights& weights,
                                          const DeviceModelOptions& options);

/// The number of GPUs.
std::int64_t gpu_count();

/// The bytes of the device's memory that are free.
Result<double> free_device_bytes(DeviceTimer& device);

/// Refuses a model for which too little of the device's memory is free, as open_device_model() does, but before there
/// are values to copy; `name` is the model's in the message.
Status check_device_memory(DeviceTimer& device, const std::string& name, const ModelSpec& model,
                           const ModelWeights& weights, const DeviceModelOptions& options);

/// A model on the timer's device, which must outlive it.
struct DeviceModel {
  std::unique_ptr<ModelRunner> runner;
  std::string impl;  // of steps
};

/// Makes a layer's weights. Called by several threads at once.
using LayerOf = std::function<Result<OwnedLayerWeights>(std::int64_t layer)>;

/// Copies the weights to the device and takes memory for cache and activations there; with several GPUs, to each its
/// part. Refuses what cuda::Model::create() and cuda::RankedModel::create() refuse; what an impl that was asked for does
/// not take is refused by its name. With `layer_of` the layers of `weights` need no values: each is made when a GPU takes
/// it.
Result<DeviceModel> open_device_model(DeviceTimer& device, const std::string& name, const ModelSpec& model,
                                      const ModelWeights& weights, const DeviceModelOptions& options,
                                      const LayerOf& layer_of = {});

/// What multiplies many tokens by dense weights: cuBLASLt with its version, or in words why it does not.
std::string product_library();
/// The algorithms that products have had so far, in words, with the tokens that cuBLASLt was asked for:
/// "128 tokens, 2560 -> 7680, float16: algorithm 66, tile 18, stages 35, split-k 1, 0 B of workspace".
std::vector<std::string> product_algorithms();

}  // namespace cf::apps
