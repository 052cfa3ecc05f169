#pragma once
// Private to cuda.
#include "core/ops/decode_layer.hpp"
#include "cuda/cuda.hpp"

namespace cf::cuda {

/// Puts one layer's launches onto the context's stream: what run(DecodeLayer::Args), a stack's steps and their graphs
/// have in common.
Status enqueue_layer(const ModelConfig& config, const LayerWeights& weights, const LayerTensors& tensors,
                     Context& context);

}  // namespace cf::cuda
