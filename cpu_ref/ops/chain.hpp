#pragma once
// The condition of an op that is a chain of others. Private to cpu_ref.
#include "cpu_ref/cpu_ref.hpp"

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

}  // namespace cf::cpu_ref
