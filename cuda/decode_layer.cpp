#include "cuda/check.hpp"

namespace cf::cuda {

/// The unfused layer: every site's own kernel, in the walk's order on the context's stream.
Status run(const ops::DecodeLayer::Args& a, Context& context) {
  CF_TRY(ops::DecodeLayer::check(a));
  return for_each_site(*a.config, a.weights, a.t, [&](const Site&, const auto& args) { return run(args, context); });
}

}  // namespace cf::cuda
