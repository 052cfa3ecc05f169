#include "cpu_ref/ops/chain.hpp"

namespace cf::cpu_ref {
namespace {

/// Every part, on intermediates of the activations' dtype.
constexpr auto kParts = [](const ops::LnQkv::Args& a, auto&& f) {
  const auto d = ops::LnQkv::dims(a);
  Tensor z(a.x.dtype, {d.tokens(), d.hidden}), w(a.x.dtype, {d.tokens(), d.heads, 3, d.head_dim});
  return ops::LnQkv::for_each_part(a, z.view<2>(), w.view<4>(), f);
};

}  // namespace

Status run(const ops::LnQkv::Args& a) { return run_chain(a, kParts); }

Result<Condition> condition(const ops::LnQkv::Args& a) { return chain_condition(a, kParts); }

}  // namespace cf::cpu_ref
