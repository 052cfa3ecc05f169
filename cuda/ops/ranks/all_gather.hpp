#pragma once
#include "cuda/ops/ranks/exchange_plan.hpp"

namespace cf::cuda {

/// Puts parts that all lie here side by side.
Result<ExchangePlan> plan_all_gather_parts(const Target&, const ops::AllGather::Args&);
/// Exchanges by words that carry their epoch, one shot. Refuses rows that are no multiple of 16 bytes.
Result<ExchangePlan> plan_all_gather_words(const Target&, const ops::AllGather::Args&);
/// Exchanges by way of the ranks' inboxes, and a second meeting before these are filled again. Refuses what the other
/// does.
Result<ExchangePlan> plan_all_gather_slices(const Target&, const ops::AllGather::Args&);

/// The launches need a list whose context is a rank's, as many ranks as the call has, and exchange memory for the part.
Status launch_all_gather_parts(const ops::AllGather::Args&, const ExchangePlan&, LaunchList&);
Status launch_all_gather_words(const ops::AllGather::Args&, const ExchangePlan&, LaunchList&);
Status launch_all_gather_slices(const ops::AllGather::Args&, const ExchangePlan&, LaunchList&);

}  // namespace cf::cuda
