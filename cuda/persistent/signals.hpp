#pragma once
// What the kinds of warps of a block tell each other. Without CUDA.
#include "core/host_device.hpp"
#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

/// What one kind of warps tells another in a block. Each signal has a barrier in shared memory.
enum class Signal : int {
  // From the consumer warps to the auxiliary warps.
  attn_x_free,     // all rows of q, k and v are multiplied: attn_x is free
  mlp_x_free,      // all rows of mlp.dense_h_to_4h are multiplied: mlp_x is free
  act_used,        // a slice of mlp.act is in registers: its buffer is free
  act_used_too,    // a slice of mlp.act in attn_x is in registers; a warp may be one slice ahead of the others
  partials_ready,  // the warps' partial results of a key split are in shared memory
  // From the auxiliary warps to the consumer warps.
  partials_taken,  // the partial results are merged: their memory is free
  context_here,    // the context is in attn_x, or attn_x is free where the consumer warps fetch the context; the next
                   // layer's pointers are in shared memory
  act_here,        // mlp.act, or a slice of it, is in mlp_x
  act_here_too,    // a slice of mlp.act is in attn_x
  copied,          // from the copy engine to the auxiliary warps: the requested tokens are in shared memory
  norms_here       // from the copy engine to the consumer warps: gamma and beta are in shared memory
};
inline constexpr int kSignals = 11;
/// How many arrivals complete a phase of a signal's barrier: one of each warp that signals, or of each thread that
/// expects copies.
CF_HD constexpr int arrivals(Signal s) {
  return s < Signal::partials_taken ? kConsumerWarps : s < Signal::norms_here ? kAuxiliaryWarps : 1;
}

}  // namespace cf::cuda
