// The names of the ops, which need no GPU.
#include "apps/bench/op_bench.hpp"
#include "core/ops/all.hpp"

namespace cf::apps {

std::vector<std::string_view> op_names() {
  return {
#define CF_OP(Op) ops::Op::name,
#include "core/ops/ops.def"

#include "core/ops/fused.def"
#include "core/ops/port.def"
#include "core/ops/ranks.def"
#undef CF_OP
  };
}

std::vector<std::string_view> linear_op_names() {
  std::vector<std::string_view> names;
#define CF_OP(Op) \
  if constexpr (HoldsLinear<ops::Op>) names.push_back(ops::Op::name);
#include "core/ops/ops.def"

#include "core/ops/fused.def"
#include "core/ops/port.def"
#include "core/ops/ranks.def"
#undef CF_OP
  return names;
}

}  // namespace cf::apps
