#include "cpu_ref/ops/chain.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {
namespace {

/// Calls f with the Args of both products.
template <class F>
Status for_each_part(const ops::LinearSum::Args& a, F&& f) {
  CF_TRY(ops::LinearSum::check(a));
  // Checked before anything is written.
  for (const LinearParams* linear : {&a.linear, &a.linear2})
    if (const auto* gptq = std::get_if<GptqWeight>(&linear->weight))
      CF_TRY(check_index(ops::LinearSum::name, "g_idx", gptq->g_idx, 0, gptq->scales.shape[0] - 1));
  return ops::LinearSum::for_each_part(a, f);
}

}  // namespace

Status run(const ops::LinearSum::Args& a) {
  return for_each_part(a, [](const auto& args) { return run(args); });
}

/// The sum over the parts of sqrt(terms) * condition, as LinearSum::budget takes it. It runs the parts.
Result<Condition> condition(const ops::LinearSum::Args& a) {
  Condition total{0, 0};
  CF_TRY(for_each_part(a, [&](const auto& args) -> Status {
    CF_TRY(run(args));
    return add_part(args, total);
  }));
  return total;
}

}  // namespace cf::cpu_ref
