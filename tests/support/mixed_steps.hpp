#pragma once
// Mixed steps: runs of a decoding sequence, of drafts that are verified and of a prompt in one call.
#include "core/call_groups.hpp"
#include "tests/support/setups.hpp"

namespace cf::test {

/// Runs of 1, 5 and 300 rows, out of order, and a sequence without one.
inline Setup mixed_setup(const ModelConfig& model, DType activation) {
  Setup s{.model = model,
          .load = {.batch = 4, .q_len = 300, .kv_len = 320, .capacity = 323},
          .activation = activation,
          .runs = {{2, 0, 1}, {0, 1, 5}, {3, 6, 300}}};
  s.model.max_position_embeddings = 323;
  if (activation == DType::bf16 || activation == DType::f16) s.weight = s.values = activation;
  return s;
}

/// Calls run(part) for each run of a call by itself, and stops at the first Status that is not ok.
template <class Args, class Run>
Status each_by_itself(const Args& args, Run&& run) {
  for (const RowRun& r : args.runs)
    CF_TRY(run(part_of(args, {.sequence = r.sequence, .first_row = r.first_row, .count = r.count})));
  return {};
}

}  // namespace cf::test
