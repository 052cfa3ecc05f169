#include "cuda/decode_layer.hpp"

#include "cuda/check.hpp"

namespace cf::cuda {

/// The unfused layer: every site's own kernel, in the walk's order.
Status enqueue_layer(const ModelConfig& config, const LayerWeights& weights, const LayerTensors& tensors,
                     Context& context) {
  return for_each_site(config, weights, tensors, [&](const Site&, const auto& args) { return run(args, context); });
}

Status run(const ops::DecodeLayer::Args& a, Context& context) {
  CF_TRY(ops::DecodeLayer::check(a));
  return enqueue_layer(*a.config, a.weights, a.t, context);
}

}  // namespace cf::cuda
