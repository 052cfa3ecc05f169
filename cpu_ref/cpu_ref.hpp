#pragma once
#include <cstdint>
#include <string_view>

#include "core/ops/all.hpp"
#include "core/status.hpp"

/// The CPU backend, Eigen + OpenMP. Activations of dtype f64 make it the oracle, computed in double throughout; f32
/// makes it the fast backend. Weights are read as stored. Results do not depend on the number of threads.
namespace cf::cpu_ref {

#define CF_OP(Op)                   \
  Status run(const ops::Op::Args&); \
  Result<Condition> condition(const ops::Op::Args&);
#include "core/ops/ops.def"
#undef CF_OP

/// The vector instructions that the fast backend uses on this processor, such as "avx2".
std::string_view instruction_set();

}  // namespace cf::cpu_ref
