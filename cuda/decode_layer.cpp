#include "cuda/decode_layer.hpp"

#include "cuda/check.hpp"

namespace cf::cuda {

/// The unfused layer: every site's own kernel, in the walk's order.
Status enqueue_layer(const ModelConfig& config, const LayerWeights& weights, const LayerTensors& tensors,
                     Context& context) {
  return for_each_site(config, weights, tensors, [&](const Site&, const auto& args) { return run(args, context); });
}

/// All sites are checked before the first is launched.
Status run(const ops::DecodeLayer::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  Context checking = context;
  checking.set_dry_run(true);
  for (Context* c : {&checking, &context}) CF_TRY(enqueue_layer(*a.config, a.weights, a.t, *c));
  return {};
}

}  // namespace cf::cuda
