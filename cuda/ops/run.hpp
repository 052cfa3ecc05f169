#pragma once
#include "core/ops/all.hpp"
#include "core/status.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// Every op, checked before anything is launched: null, misaligned or host pointers, shapes and dtypes that do not
/// match, scalars out of bounds; Code::unimplemented with the reason where there is no kernel. Values in device memory
/// (kv_len, positions, ids) cannot be looked at before a launch: the kernels read nothing out of bounds for them, and
/// what depends on them comes out as NaN.
///   all        sizes of rows a multiple of 8; runs that differ in one launch, or one for each group of equal ones
///   norms      hidden up to 32768
///   linear     16-bit activations with weights of the same dtype or with packed GPTQ weights; float32 activations with
///              dense weights of any dtype. pack() (cuda/ops/linear/pack/pack.hpp) packs a GptqWeight. Many tokens of
///              16 bits go through cuBLASLt (cuda/ops/linear/cublaslt/library.hpp) where the launch list has the
///              scratch memory for it; on Hopper those with a dense weight and GELU have a kernel of their own
///   attention  head_dim up to 256; pages of a multiple of 64 entries up to 1024
#define CF_OP(Op) Status run(const ops::Op::Args&, Context&);
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/ranks.def"
#undef CF_OP

/// The same checks and plans without a launch: the op's launches are added to the list, to be submitted later and as
/// often as one likes. After a refusal the list may hold a part of the call: drop it.
#define CF_OP(Op) Status prepare(const ops::Op::Args&, LaunchList&);
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/ranks.def"
#undef CF_OP

}  // namespace cf::cuda
