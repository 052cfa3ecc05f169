#include "cpu_ref/ops/chain.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {
namespace {

/// Calls f with the Args of both parts, on an intermediate of the activations' dtype.
template <class F>
Status for_each_part(const ops::RmsQkv::Args& a, F&& f) {
  CF_TRY(ops::RmsQkv::check(a));
  // Checked before anything is written.
  if (const auto* gptq = std::get_if<GptqWeight>(&a.linear.weight))
    CF_TRY(check_index(ops::RmsQkv::name, "g_idx", gptq->g_idx, 0, gptq->scales.shape[0] - 1));
  const auto d = ops::RmsQkv::dims(a);
  CF_TRY(check_index(ops::RmsQkv::name, "positions", a.positions, 0, d.table_rows - 1));
  CF_TRY(check_lengths(ops::RmsQkv::name, a.kv_len, a.runs, d, d.capacity));
  Tensor w(a.x.dtype, {d.tokens(), d.heads + 2 * d.kv_heads, 1, d.head_dim});
  return ops::RmsQkv::for_each_part(a, w.view<4>(), f);
}

}  // namespace

Status run(const ops::RmsQkv::Args& a) {
  return for_each_part(a, [](const auto& args) { return run(args); });
}

/// The sum over the parts of sqrt(terms) * condition, as RmsQkv::budget takes it. It runs the parts: each reads what the
/// part before it made.
Result<Condition> condition(const ops::RmsQkv::Args& a) {
  Condition total{0, 0};
  CF_TRY(for_each_part(a, [&](const auto& args) -> Status {
    CF_TRY(run(args));
    return add_part(args, total);
  }));
  return total;
}

}  // namespace cf::cpu_ref
