#pragma once
// Order of stores to shared memory and bulk copies to the same place.

namespace cf::cuda {

/// Orders this thread's stores to shared memory before bulk copies that overwrite what it stored. Whoever starts such a
/// copy waits for this thread after this call.
__device__ inline void let_copies_overwrite() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace cf::cuda
