#include "cpu_ref/ops/chain.hpp"

namespace cf::cpu_ref {
namespace {

/// Both parts, on an intermediate of the activations' dtype.
constexpr auto kParts = [](const ops::RmsQkv::Args& a, auto&& f) {
  const auto d = ops::RmsQkv::dims(a);
  Tensor w(a.x.dtype, {d.tokens(), d.heads + 2 * d.kv_heads, 1, d.head_dim});
  return ops::RmsQkv::for_each_part(a, w.view<4>(), f);
};

}  // namespace

Status run(const ops::RmsQkv::Args& a) { return run_chain(a, kParts); }

Result<Condition> condition(const ops::RmsQkv::Args& a) { return chain_condition(a, kParts); }

}  // namespace cf::cpu_ref
