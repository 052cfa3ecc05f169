#pragma once
// A whole model on a GPU, for a walk. The header names no CUDA types: the programs include it in every build.
#include <cstdint>
#include <memory>
#include <string>

#include "core/model/decoder.hpp"
#include "core/model/weights.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// A model on the first GPU, with weights of its own there and a cache of one slot with `capacity` entries. A prompt
/// goes through it `chunk` tokens at a time. Refuses what cuda::Model::create() refuses, and a build without the CUDA
/// backend. `name` is the model's in messages.
Result<std::unique_ptr<ModelRunner>> make_device_runner(const std::string& name, const ModelSpec& model,
                                                        const ModelWeights& weights, std::int64_t capacity,
                                                        std::int64_t chunk);

}  // namespace cf::apps
