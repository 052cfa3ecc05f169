#include <cstring>

#include "cpu_ref/ops/chain.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {
namespace {

/// Calls f with the Args of every part, on intermediates of the activations' dtype; w is the product.
template <class F>
Status for_each_part(const ops::LnQkvHeads::Args& a, Tensor& w, F&& f) {
  CF_TRY(ops::LnQkvHeads::check(a));
  const auto d = ops::LnQkvHeads::dims(a);
  // Checked before anything is written.
  if (const auto* gptq = std::get_if<GptqWeight>(&a.linear.weight))
    CF_TRY(check_index(ops::LnQkvHeads::name, "g_idx", gptq->g_idx, 0, gptq->scales.shape[0] - 1));
  Tensor z(a.x.dtype, {d.tokens(), d.hidden});
  w = Tensor(a.x.dtype, {d.tokens(), d.out()});
  return ops::LnQkvHeads::for_each_part(a, z.view<2>(), w.view<2>(), f);
}

}  // namespace

Status run(const ops::LnQkvHeads::Args& a) {
  Tensor w;
  CF_TRY(for_each_part(a, w, [](const auto& args) { return run(args); }));
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

/// The sum over the parts of sqrt(terms) * condition, as LnQkvHeads::budget takes it. It runs the parts: each reads
/// what the part before it made.
Result<Condition> condition(const ops::LnQkvHeads::Args& a) {
  Condition total{0, 0};
  Tensor w;
  CF_TRY(for_each_part(a, w, [&](const auto& args) -> Status {
    CF_TRY(run(args));
    return add_part(args, total);
  }));
  return total;
}

}  // namespace cf::cpu_ref
