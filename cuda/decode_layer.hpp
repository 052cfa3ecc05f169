#pragma once
// Private to cuda.
#include "core/ops/decode_layer.hpp"
#include "cuda/cuda.hpp"
#include "cuda/dataflow_capture.hpp"

namespace cf::cuda {

/// Puts one layer's launches onto the context's stream: what run(DecodeLayer::Args) and a stack's steps have in common.
Status enqueue_layer(const ModelConfig& config, const LayerWeights& weights, const LayerTensors& tensors,
                     Context& context);

/// Adds one layer to a graph. Everything that enqueue_layer() writes gets the same bits, but for attn_in and qkv, which
/// few tokens leave as they are.
Status capture_layer(const ModelConfig& config, const LayerWeights& weights, const LayerTensors& tensors,
                     DataflowCapture& graph);

}  // namespace cf::cuda
