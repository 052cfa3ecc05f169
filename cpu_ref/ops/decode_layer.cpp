#include "cpu_ref/ops/chain.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {
namespace {

/// Refuses everything that a site would refuse. A site that refuses comes too late: earlier ones have appended to the
/// cache.
Status check_sites(const ops::DecodeLayer::Args& a) {
  constexpr std::string_view name = ops::DecodeLayer::name;
  CF_TRY(ops::DecodeLayer::check(a));
  CF_TRY(for_each_site(a.model, a.weights, a.t,
                       []<class Args>(const Site&, const Args& args) { return Args::Op::check(args); }));
  const auto d = ops::DecodeLayer::dims(a);
  if (a.model.shape.rotary_dim > 0) CF_TRY(check_index(name, "positions", a.t.positions, 0, d.step.table_rows - 1));
  CF_TRY(check_append(name, a.t, d.step, d.max_kv_len, a.t.stream));
  CF_TRY(check_seen_pages(name, a.t, d.step, table_of(a.t.runs, d.step.batch, d.step.q_len), window_of(a.model, a.t)));
  Status status;
  for_each_linear(a.model, a.weights, [&](const Site& site, const LinearParams& l, const LinearSize&) {
    if (status) status = check_weight_values(name, l.weight, site.name);
  });
  return status;
}

}  // namespace

Status run(const ops::DecodeLayer::Args& a) {
  CF_TRY(check_sites(a));
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
