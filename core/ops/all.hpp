#pragma once
#include <tuple>

#include "core/ops/all_gather.hpp"
#include "core/ops/all_reduce.hpp"
#include "core/ops/append_rows.hpp"
#include "core/ops/attention.hpp"
#include "core/ops/decode_layer.hpp"
#include "core/ops/embedding.hpp"
#include "core/ops/kv_append.hpp"
#include "core/ops/layernorm.hpp"
#include "core/ops/layernorm_residual.hpp"
#include "core/ops/linear.hpp"
#include "core/ops/linear_sum.hpp"
#include "core/ops/ln_qkv.hpp"
#include "core/ops/ln_qkv_heads.hpp"
#include "core/ops/qk_norm.hpp"
#include "core/ops/residual_layernorm.hpp"
#include "core/ops/rms_linear.hpp"
#include "core/ops/rms_qkv.hpp"
#include "core/ops/rmsnorm.hpp"
#include "core/ops/rope.hpp"
#include "core/ops/rope_append.hpp"

namespace cf::ops {
namespace detail {
template <class, class... Ops>
struct Tail {
  using type = std::tuple<Ops...>;
};
}  // namespace detail

/// Every op of ops.def.
using All = detail::Tail<void
#define CF_OP(Op) , Op
#include "core/ops/ops.def"
#undef CF_OP
                         >::type;
/// Every op of fused.def.
using Fused = detail::Tail<void
#define CF_OP(Op) , Op
#include "core/ops/fused.def"
#undef CF_OP
                           >::type;
/// Every op of ranks.def.
using Ranks = detail::Tail<void
#define CF_OP(Op) , Op
#include "core/ops/ranks.def"
#undef CF_OP
                           >::type;
/// Every op of port.def.
using Port = detail::Tail<void
#define CF_OP(Op) , Op
#include "core/ops/port.def"
#undef CF_OP
                          >::type;
/// What a program may have.
using Every = decltype(std::tuple_cat(All{}, Fused{}, Ranks{}));
/// Every op that has a contract and an oracle.
using Contracts = decltype(std::tuple_cat(Every{}, Port{}));
}  // namespace cf::ops
