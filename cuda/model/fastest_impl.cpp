#include "cuda/model/fastest_impl.hpp"

#include <algorithm>

#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

Impl fastest_impl(const Arch& arch, const ModelSpec& model, DType dtype, bool is_quantised, std::int64_t slots) {
  // The bounds are chosen by the times of all layers: in ms, on an H200, of one slot at kv_len 128 where a row names
  // nothing else. Records: data/bench/stack-*.json; for several slots of Llama and Qwen TRIALS.md there, llama-batches.
  //
  //   model                         persistent  graph
  //   parallel residual:
  //   Pythia-410M                         0.38   0.39
  //   Pythia-410M, on an H100            0.413  0.418
  //   Pythia-1.4B                         0.60   0.79
  //   Pythia-2.8B, four slots             1.52   1.68
  //   Pythia-2.8B, eight slots            1.85   1.80
  //   sequential residual, where no work hides the waits between blocks:
  //   Llama-3.2-3B, two slots             2.04   1.78
  //   Qwen2.5-7B, two slots               3.62   3.70
  //   Llama-3.1-8B, two slots             3.85   4.04
  //   Llama-3.1-8B, four slots            4.15   4.08
  //   packed weights, which run in the graph:
  //   Pythia-2.8B                         0.92   0.51
  //   Pythia-2.8B, four slots             1.93   0.74
  //   Pythia-6.9B                         1.40   1.02
  //   Llama-3.1-8B, kv_len 512            1.77   1.25
  //
  // A bound says that the persistent kernel is the faster one for up to `most_slots` slots of a model whose hidden_size
  // is at least `least_hidden`.
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
