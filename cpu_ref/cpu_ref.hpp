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
#include "core/ops/fused.def"
#include "core/ops/port.def"
#include "core/ops/ranks.def"
#undef CF_OP

/// Gives the calling thread's parallel work from now on so many threads, and starts them: memory that is taken later
/// cannot keep them from starting. Refuses what check_threads() refuses, and threads whose stacks are too small for the
/// ops, as OMP_STACKSIZE can make them. `option` is what the message calls the number.
Status start_threads(std::string_view option, std::int64_t threads);

/// The vector instructions that the fast backend uses on this processor, such as "avx2".
std::string_view instruction_set();

}  // namespace cf::cpu_ref
