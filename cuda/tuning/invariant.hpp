#pragma once
// The numbers of invariant models: there is one class of step sizes, so that a row's bits do not depend on the number of
// rows of its step at all.
#include "cuda/tuning/h200.hpp"

namespace cf::cuda {

/// Every step has kernels with one order of sums. Dense weights in 16 bits are multiplied by cuBLASLt and, with GELU, by
/// tiles and by wgmma without splits; packed weights by packed's kernels of several tokens, fp8 ones by gemv_fp8.
/// Attention is that of prompts.
constexpr Tuning in_one_class(Tuning t) {
  t.step_classes.fill({.first = 1, .last = kAnyTokens, .planned_as = 2048});
  t.gemv_tokens = 0;
  t.packed_tokens = kAnyTokens;
  t.fp8_tokens = kAnyTokens;
  t.packed_wgmma_first = kAnyTokens;
  t.packed_wgmma_tokens = 0;
  t.prefill_queries = 1;
  t.ln_qkv_tokens = 0;
  for (auto* bounds : {&t.persistent_parallel, &t.persistent_sequential})
    bounds->fill({.most_slots = 0, .least_hidden = kAnyTokens});
  return t;
}
inline constexpr Tuning kInvariantTuning = in_one_class(kH200Tuning);

}  // namespace cf::cuda
