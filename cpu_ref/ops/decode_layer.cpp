#include "cpu_ref/ops/chain.hpp"

namespace cf::cpu_ref {

Status run(const ops::DecodeLayer::Args& a) {
  CF_TRY(ops::DecodeLayer::check(a));
  return for_each_site(a.model, a.weights, a.t, [](const Site&, const auto& args) { return run(args); });
}

/// The sum over the sites of sqrt(terms) * condition, as DecodeLayer::budget takes it. It reads every site's inputs, so
/// the layer must have run.
Result<Condition> condition(const ops::DecodeLayer::Args& a) {
  CF_TRY(ops::DecodeLayer::check(a));
  Condition total{0, 0};
  CF_TRY(for_each_site(a.model, a.weights, a.t, [&](const Site&, const auto& args) { return add_part(args, total); }));
  return total;
}

}  // namespace cf::cpu_ref
