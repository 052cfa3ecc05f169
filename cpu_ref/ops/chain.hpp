#pragma once
// Ops that are chains of others: their parts in turn. Private to cpu_ref.
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/weight_values.hpp"

namespace cf::cpu_ref {

/// Adds a part's sqrt(terms) * condition to the chain's condition, whose budget has terms = 1. The part must have run.
template <class Args>
Status add_part(const Args& args, Condition& total) {
  CF_TRY_ASSIGN(const Condition c, condition(args));
  // Without the rounding of its output the part's budget is u * sqrt(terms) * c.l2, and 4 u * sqrt(terms) * c.max.
  const Budget b = Args::Op::budget(Args::Op::dims(args), {.compute = DType::f64, .output = DType::i32}, c);
  total.l2 += b.rel_l2 / unit_roundoff(DType::f64);
  total.max += b.rel_max / unit_roundoff(DType::f64) / 4;
  return {};
}

/// Checks a chain's call, and the values that its parts would check one by one: nothing is written by then.
template <class Args>
Status check_chain(const Args& a) {
  using Op = typename Args::Op;
  CF_TRY(Op::check(a));
  [[maybe_unused]] const auto d = Op::dims(a);
  if constexpr (requires { a.linear; }) CF_TRY(check_weight_values(Op::name, a.linear.weight));
  if constexpr (requires { a.linear2; }) CF_TRY(check_weight_values(Op::name, a.linear2.weight));
  if constexpr (requires { a.positions; }) CF_TRY(check_index(Op::name, "positions", a.positions, 0, d.table_rows - 1));
  if constexpr (requires { a.kv_len; }) CF_TRY(check_append(Op::name, a, d, d.capacity));
  return {};
}

/// Runs a chain. `parts(a, f)` calls f with the Args of every part, on intermediates of its own.
template <class Args, class Parts>
Status run_chain(const Args& a, const Parts& parts) {
  CF_TRY(check_chain(a));
  return parts(a, [](const auto& part) { return run(part); });
}

/// The sum over the parts of sqrt(terms) * condition, as a chain's budget takes it. It runs the chain: each part reads
/// what the part before it made.
template <class Args, class Parts>
Result<Condition> chain_condition(const Args& a, const Parts& parts) {
  CF_TRY(check_chain(a));
  Condition total{0, 0};
  CF_TRY(parts(a, [&](const auto& part) -> Status {
    CF_TRY(run(part));
    return add_part(part, total);
  }));
  return total;
}

}  // namespace cf::cpu_ref
