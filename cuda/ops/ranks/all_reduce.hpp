#pragma once
#include "cuda/ops/ranks/exchange_plan.hpp"

namespace cf::cuda {

/// The sum of parts that all lie here.
Result<ExchangePlan> plan_all_reduce_parts(const Target&, const ops::AllReduce::Args&);
/// Exchanges by words that carry their epoch, one shot. Refuses parts that are no multiple of 16 bytes.
Result<ExchangePlan> plan_all_reduce_words(const Target&, const ops::AllReduce::Args&);
/// Exchanges of slices, two shots. Refuses what the other does.
Result<ExchangePlan> plan_all_reduce_slices(const Target&, const ops::AllReduce::Args&);

/// Add the launches of one rank. The list's context is that rank's, the ranks are as many as the call says, and their
/// exchange memory has room for the part.
Status launch_all_reduce_parts(const ops::AllReduce::Args&, const ExchangePlan&, LaunchList&);
Status launch_all_reduce_words(const ops::AllReduce::Args&, const ExchangePlan&, LaunchList&);
Status launch_all_reduce_slices(const ops::AllReduce::Args&, const ExchangePlan&, LaunchList&);

}  // namespace cf::cuda
