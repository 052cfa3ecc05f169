#include "cpu_ref/ops/chain.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {
namespace {

/// Calls f with the Args of every part, on intermediates of the activations' dtype.
template <class F>
Status for_each_part(const ops::LnQkv::Args& a, F&& f) {
  CF_TRY(ops::LnQkv::check(a));
  const auto d = ops::LnQkv::dims(a);
  // Checked before anything is written.
  CF_TRY(check_index(ops::LnQkv::name, "positions", a.positions, 0, d.table_rows - 1));
  CF_TRY(check_lengths(ops::LnQkv::name, a.kv_len, a.runs, d, d.capacity));
  if (const auto* gptq = std::get_if<GptqWeight>(&a.linear.weight))
    CF_TRY(check_index(ops::LnQkv::name, "g_idx", gptq->g_idx, 0, gptq->scales.shape[0] - 1));
  Tensor z(a.x.dtype, {d.tokens(), d.hidden}), w(a.x.dtype, {d.tokens(), d.heads, 3, d.head_dim});
  return ops::LnQkv::for_each_part(a, z.view<2>(), w.view<4>(), f);
}

}  // namespace

Status run(const ops::LnQkv::Args& a) {
  return for_each_part(a, [](const auto& args) { return run(args); });
}

/// The sum over the parts of sqrt(terms) * condition, as LnQkv::budget takes it. It runs the parts: each reads what the
/// part before it made.
Result<Condition> condition(const ops::LnQkv::Args& a) {
  Condition total{0, 0};
  CF_TRY(for_each_part(a, [&](const auto& args) -> Status {
    CF_TRY(run(args));
    return add_part(args, total);
  }));
  return total;
}

}  // namespace cf::cpu_ref
