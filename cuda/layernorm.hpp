#pragma once
#include <cstdint>

#include "cuda/arch.hpp"

namespace cf::cuda {

/// How the kernels with a LayerNorm lay out a row: it lies in the registers of one block, `elements` of it a thread.
/// Plans are values; every plan computes the same, to rounding.
struct LayerNormPlan {
  int elements;  // 8, 16 or 64, a template argument of the kernels
  int threads;   // a block, whole warps
};

inline constexpr std::int64_t kMaxLayerNormHidden = 32768;

/// The most threads of a block, and how many such blocks an SM must have registers for; 0 leaves that to the compiler. A
/// thread then has at most 64 registers, or 128 with 64 elements.
constexpr int max_layernorm_threads(int elements) { return elements == 8 ? 1024 : 512; }
constexpr int min_layernorm_blocks(int elements) { return elements == 16 ? 2 : 0; }

/// Few rows: eight elements a thread, the shortest way from a row's first load to its last store. More rows than the SMs
/// take at once that way: 16, which leaves fewer instructions an element, unless x is the sum of `inputs` > 1 tensors,
/// whose loads are enough to wait for. Longer rows than blocks of either hold: 64.
constexpr LayerNormPlan layernorm_plan(const Arch& arch, std::int64_t tokens, std::int64_t hidden, int inputs) {
  constexpr auto threads = [](std::int64_t n, int elements) {
    return int((n + elements - 1) / elements + 31) / 32 * 32;
  };
  const bool at_once = tokens * threads(hidden, 8) <= std::int64_t(arch.sm_count) * arch.threads_per_sm;
  int elements = at_once || inputs > 1 ? 8 : 16;
  if (threads(hidden, elements) > max_layernorm_threads(elements)) elements = 64;
  return {.elements = elements, .threads = threads(hidden, elements)};
}

}  // namespace cf::cuda
