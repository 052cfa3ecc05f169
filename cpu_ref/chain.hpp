#pragma once
// The condition of an op that is a chain of others. Private to cpu_ref.
#include "cpu_ref/cpu_ref.hpp"

namespace cf::cpu_ref {

/// Adds sqrt(terms) * condition of a part that has run to the chain's condition, whose budget has terms = 1.
template <class Args>
Status add_part(const Args& args, Condition& total) {
  const Result<Condition> c = condition(args);
  if (!c) return c.status();
  // The part's budget less its store is u * sqrt(terms) * condition, and four times that for the maximum.
  const Budget b = Args::Op::budget(Args::Op::dims(args), {.compute = DType::f64, .output = DType::i32}, *c);
  total.l2 += b.rel_l2 / unit_roundoff(DType::f64);
  total.max += b.rel_max / unit_roundoff(DType::f64) / 4;
  return {};
}

}  // namespace cf::cpu_ref
