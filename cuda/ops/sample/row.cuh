#pragma once
// A row of logits that the threads of a block read together.
#include <cstdint>

#include "cuda/device/vec.cuh"

namespace cf::cuda {

/// Calls f(logit, id) for all ids. The kThreads threads of a block share them, and a thread's ids ascend. A row begins
/// anywhere: what lies before and behind its whole vectors of 16 bytes is loaded by elements. A thread has kInFlight
/// vectors on their way at once.
template <int kThreads, int kInFlight, class T, class F>
__device__ void for_each_logit(const T* logits, std::int32_t vocab, F f) {
  const int thread = int(threadIdx.x);
  const int before = int(-reinterpret_cast<std::uintptr_t>(logits) % 16 / sizeof(T));
  const int lead = before < vocab ? before : vocab;
  if (thread < lead) f(to_float(logits[thread]), thread);

  const T* const whole = logits + lead;
  const int vectors = (vocab - lead) / kLane<T>;
  for (int first = thread; first < vectors; first += kInFlight * kThreads) {
    uint4 raw[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (const int v = first + i * kThreads; v < vectors) raw[i] = load_raw(whole + v * kLane<T>);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (const int v = first + i * kThreads; v < vectors) {
        float x[kLane<T>];
        unpack(raw[i], x, T{});
#pragma unroll
        for (int e = 0; e < kLane<T>; ++e) f(x[e], lead + v * kLane<T> + e);
      }
  }
  if (const int id = lead + vectors * kLane<T> + thread; id < vocab) f(to_float(logits[id]), id);
}

}  // namespace cf::cuda
