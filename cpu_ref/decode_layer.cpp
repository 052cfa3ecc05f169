#include <cmath>

#include "cpu_ref/cpu_ref.hpp"

namespace cf::cpu_ref {

Status run(const ops::DecodeLayer::Args& a) {
  CF_TRY(ops::DecodeLayer::check(a));
  return for_each_site(*a.config, a.weights, a.t, [](const Site&, const auto& args) { return run(args); });
}

/// The sum over the sites of sqrt(terms) * condition, as DecodeLayer::budget takes it. It reads every site's inputs, so
/// the layer must have run.
Result<Condition> condition(const ops::DecodeLayer::Args& a) {
  CF_TRY(ops::DecodeLayer::check(a));
  Condition total{0, 0};
  CF_TRY(for_each_site(*a.config, a.weights, a.t, [&]<class Args>(const Site&, const Args& args) -> Status {
    const Result<Condition> c = condition(args);
    if (!c) return c.status();
    // The site's budget less its store is u * sqrt(terms) * condition, and four times that for the maximum.
    const Budget b = Args::Op::budget(Args::Op::dims(args), {.compute = DType::f64, .output = DType::i32}, *c);
    total.l2 += b.rel_l2 / unit_roundoff(DType::f64);
    total.max += b.rel_max / unit_roundoff(DType::f64) / 4;
    return {};
  }));
  return total;
}

}  // namespace cf::cpu_ref
