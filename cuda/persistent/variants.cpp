#include "cuda/persistent/variants.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace cf::cuda {

bool same_bits(const PersistentPlan& a, const PersistentPlan& b) {
  const auto order = [](const PersistentPlan& p) {
    return std::tuple(p.products, p.hidden_slices, p.context_slices, p.act_slices, p.gqa_heads, p.attention_splits);
  };
  return order(a) == order(b);
}

std::vector<PersistentVariant> persistent_variants(const PersistentPlan& plan) {
  const auto text = [](int n) { return std::to_string(n); };
  const auto kilobytes = [&](int stages) { return text(stages * plan.stage_bytes >> 10) + " KB"; };
  std::vector<PersistentVariant> all;
  const auto add = [&](const char* choice, std::string value, PersistentChoices choices) {
    all.push_back({choice, std::move(value), choices});
  };
  add("none", "the plan's own choice", {});
  for (int stages = 1; stages <= plan.stages - 2; ++stages)
    if (stages != plan.stages_in_flight) add("bytes in flight", kilobytes(stages), {.stages_in_flight = stages});
  for (int stages = 3; stages < plan.stages; ++stages)
    add("ring",
        kilobytes(stages) + ", of them " + kilobytes(std::min(stages - 2, plan.stages_in_flight)) + " in flight",
        {.stages = stages});
  if (!is_packed(plan.products)) add("prefetch", "none while the ring is full", {.ahead_stages = 0});
  for (int eighths : {0, 2, 4, 6, 8})
    if (eighths != plan.up_eighths)
      add("dependencies",
          eighths == 0   ? "nothing hides those on q, k and v"
          : eighths == 8 ? "nothing hides those on the context"
                         : text(eighths) + " eighths of the MLP's first product before attention",
          {.up_eighths = eighths});
  if (!is_tiled(plan.products)) add("products", "tiles, as with several tokens", {.tile_products = true});
  for (int splits : {1, 2, 4})
    if (splits < plan.attention_splits) add("attention splits", text(splits), {.attention_splits = splits});
  if (plan.gqa_heads > 1) add("keys", "each query head loads its own", {.shares_keys = false});
  if (plan.gqa_heads == 1 && plan.group_gqa_tiles > 1 && !is_packed(plan.products))
    add("keys", "a group's heads share them", {.shares_keys = true});
  return all;
}

}  // namespace cf::cuda
