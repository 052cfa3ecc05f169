#include "cuda/decode_variants.hpp"

#include <algorithm>

namespace cf::cuda {

std::vector<DecodeVariant> decode_variants(const Arch& arch, const DecodeStackPlan& plan) {
  const auto n = [](int i) { return std::to_string(i); };
  const auto kilobytes = [&](int stages) { return n(stages * plan.stage_bytes >> 10) + " KB"; };
  std::vector<DecodeVariant> all;
  const auto add = [&](const char* part, std::string name, DecodeChoices choices, bool same_bits = true) {
    all.push_back({part, std::move(name), choices, same_bits});
  };
  add("none", "the plan's own choice", {});
  for (int stages = 1; stages <= plan.stages - 2; ++stages)
    if (stages != plan.stages_in_flight) add("bytes in flight", kilobytes(stages), {.stages_in_flight = stages});
  for (int stages = 3; stages < plan.stages; ++stages)
    add("ring",
        kilobytes(stages) + ", of them " + kilobytes(std::min(stages - 2, plan.stages_in_flight)) + " in flight",
        {.stages = stages});
  for (int eighths : {0, 2, 4, 6, 8})
    if (eighths != plan.up_eighths)
      add("dependencies",
          eighths == 0   ? "nothing hides those on q, k and v"
          : eighths == 8 ? "nothing hides those on the context"
                         : n(eighths) + " eighths of the MLP's first product before attention",
          {.up_eighths = eighths});
  for (int splits : {1, 2, 4})
    if (splits < plan.attention_splits) add("attention splits", n(splits), {.attention_splits = splits}, false);
  for (int splits = 2; splits <= std::min(plan.attention_splits, arch.max_cluster_blocks); splits *= 2)
    add("attention merge", n(splits) + " splits, in a cluster's shared memory",
        {.attention_splits = splits, .cluster_merge = true}, splits == plan.attention_splits);
  return all;
}

}  // namespace cf::cuda
