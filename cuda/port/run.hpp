#pragma once
#include "core/ops/all.hpp"
#include "core/status.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

using ops::AppendRows;
using ops::TokenRows;

/// The ops of port.def, checked and launched as cuda/ops/run.hpp says of those that programs have.
///   append_rows  a head's row is a multiple of 16 bytes; kv_len is not read: `rows.last` says which entry is new
#define CF_OP(Op)                             \
  Status run(const ops::Op::Args&, Context&); \
  Status prepare(const ops::Op::Args&, LaunchList&);
#include "core/ops/port.def"
#undef CF_OP

}  // namespace cf::cuda
