#include <cstring>

#include "cpu_ref/ops/chain.hpp"

namespace cf::cpu_ref {
namespace {

/// The norm and the product, on an intermediate of the activations' dtype. The product goes to w.
auto parts_to(Tensor& w) {
  return [&w](const ops::LnQkvHeads::Args& a, auto&& f) {
    const auto d = ops::LnQkvHeads::dims(a);
    Tensor z(a.x.dtype, {d.tokens(), d.hidden});
    w = Tensor(a.x.dtype, {d.tokens(), d.out()});
    return ops::LnQkvHeads::for_each_part(a, z.view<2>(), w.view<2>(), f);
  };
}

}  // namespace

Status run(const ops::LnQkvHeads::Args& a) {
  Tensor w;
  CF_TRY(run_chain(a, parts_to(w)));
  const auto d = ops::LnQkvHeads::dims(a);
  const std::size_t bytes = std::size_t(d.head_dim) * size_bytes(w.dtype());
  const auto* from = static_cast<const char*>(w.data());
  for (const RowRun& run : table_of(a.runs, d.batch, d.q_len))
    for (std::int64_t s = 0; s < run.count; ++s)
      for (const AnyView<4>& to : {a.q, a.k, a.v})
        for (std::int64_t h = 0; h < to.shape[1]; ++h, from += bytes)
          std::memcpy(
              static_cast<char*>(to.data) + std::size_t(run.first_row * to.shape[1] + h * run.count + s) * bytes, from,
              bytes);
  return {};
}

Result<Condition> condition(const ops::LnQkvHeads::Args& a) {
  Tensor w;
  return chain_condition(a, parts_to(w));
}

}  // namespace cf::cpu_ref
