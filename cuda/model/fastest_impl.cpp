#include "cuda/model/fastest_impl.hpp"

#include <algorithm>

#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

Impl fastest_impl(const Arch& arch, const ModelSpec& model, DType dtype, bool is_quantised, std::int64_t slots) {
  // The persistent kernel takes steps of at most most_slots slots for models of at least least_hidden. Times of all
  // layers in ms, those of the persistent kernel before those of the graph, at kv_len 128 on an H200 (data/bench):
  // - With a parallel residual: 0.60 and 0.79 for Pythia-1.4B, 1.84 and 1.80 for eight slots of Pythia-2.8B. On an H100
  //   0.413 and 0.418 for Pythia-410M (stack-pythia-410m-h100.json).
  // - With a sequential residual nothing hides the waits between blocks. Two slots: 3.85 and 4.04 for Llama-3.1-8B,
  //   3.62 and 3.70 for Qwen2.5-7B, 2.04 and 1.78 for Llama-3.2-3B. Four slots: 4.15 and 4.08 for Llama-3.1-8B
  //   (llama-batches.json).
  // - Packed weights, which the graph takes: 0.92 and 0.51 for Pythia-2.8B, 1.77 and 1.24 for Llama-3.1-8B, 1.40 and
  //   1.02 for Pythia-6.9B, 1.93 and 0.74 for four slots of Pythia-2.8B (stack-*-gptq-persistent*.json).
  struct Bound {
    std::int64_t most_slots, least_hidden;
  };
  constexpr Bound parallel[] = {{1, 1024}, {4, 2048}}, sequential[] = {{1, 2048}, {2, 3584}};
  const bool is_faster = std::ranges::any_of(
      model.traits.residual == Residual::parallel ? parallel : sequential,
      [&](const Bound& b) { return slots <= b.most_slots && model.shape.hidden_size >= b.least_hidden; });
  const bool suits = is_faster && arch.compute_capability >= 90 && !is_quantised &&
                     model.shape.num_layers < kMaxPersistentLayers &&
                     plan_persistent(arch, persistent_model(model, dtype), slots);
  return suits ? Impl::persistent : Impl::graph;
}

}  // namespace cf::cuda
