#include "cuda/step/fastest_impl.hpp"

#include <algorithm>

#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

Impl fastest_impl(const Arch& arch, const ModelSpec& model, DType dtype, bool is_quantised, std::int64_t slots) {
  const bool is_faster = std::ranges::any_of(
      model.traits.residual == Residual::parallel ? arch.tuning->persistent_parallel
                                                  : arch.tuning->persistent_sequential,
      [&](const PersistentBound& b) { return slots <= b.most_slots && model.shape.hidden_size >= b.least_hidden; });
  const bool suits = is_faster && model.ranks == 1 && arch.has_clusters() && !is_quantised &&
                     model.shape.num_layers < kMaxPersistentLayers &&
                     plan_persistent(arch, persistent_model(model, dtype), slots);
  return suits ? Impl::persistent : Impl::graph;
}

}  // namespace cf::cuda
