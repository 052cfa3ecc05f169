#pragma once
// Private to cuda/model.
#include "core/model/layer.hpp"
#include "cuda/graph/capture.hpp"

namespace cf::cuda {

/// Adds one layer to a graph. What the layer's sites write gets the same bits as launched one by one, but for tensors
/// that are not written: attn_in and qkv where ln_qkv or RmsQkv takes the place of their sites, mlp_in where RmsLinear
/// does, k and v where rope_append or RmsQkv takes the place of two.
Status capture_layer(const ModelSpec& model, const LayerWeights& weights, const LayerTensors& tensors,
                     DataflowCapture& graph);

}  // namespace cf::cuda
