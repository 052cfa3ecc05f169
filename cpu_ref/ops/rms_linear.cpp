#include "cpu_ref/ops/chain.hpp"

namespace cf::cpu_ref {
namespace {

/// Both parts, on an intermediate of the activations' dtype.
constexpr auto kParts = [](const ops::RmsLinear::Args& a, auto&& f) {
  const auto d = ops::RmsLinear::dims(a);
  Tensor z(a.x.dtype, {d.tokens, d.hidden});
  return ops::RmsLinear::for_each_part(a, z.view<2>(), f);
};

}  // namespace

Status run(const ops::RmsLinear::Args& a) { return run_chain(a, kParts); }

Result<Condition> condition(const ops::RmsLinear::Args& a) { return chain_condition(a, kParts); }

}  // namespace cf::cpu_ref
