#pragma once
#include <cstdint>
#include <string>

#include "cuda/ops/kernel.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// How many threads share an all_reduce.
struct AllReducePlan {
  std::int64_t blocks;
  int threads;
  int shots;  // exchanges of the ranks, one after the other; 0 where all parts lie here
};

inline std::string to_string(const AllReducePlan& p) {
  const std::string text = plan_text({{p.blocks, "blocks"}, {p.threads, "threads"}});
  return p.shots == 0 ? text : text + (p.shots == 1 ? ", one shot" : ", two shots");
}

/// The sum of parts that all lie here.
Result<AllReducePlan> plan_all_reduce_parts(const Target&, const ops::AllReduce::Args&);
/// Exchanges by words that carry their epoch, one shot. Refuses parts that are no multiple of 16 bytes.
Result<AllReducePlan> plan_all_reduce_words(const Target&, const ops::AllReduce::Args&);
/// Exchanges of slices, two shots. Refuses what the other does.
Result<AllReducePlan> plan_all_reduce_slices(const Target&, const ops::AllReduce::Args&);

/// The launches need a list whose context is a rank's, as many ranks as the call has, and exchange memory for the part.
Status launch_all_reduce_parts(const ops::AllReduce::Args&, const AllReducePlan&, LaunchList&);
Status launch_all_reduce_words(const ops::AllReduce::Args&, const AllReducePlan&, LaunchList&);
Status launch_all_reduce_slices(const ops::AllReduce::Args&, const AllReducePlan&, LaunchList&);

}  // namespace cf::cuda
