#pragma once
#include "core/view.hpp"
#include "cuda/ops/sample/sample.hpp"

namespace cf::cuda {

/// The sampler of ranks that each have a part of every slot's logits. Slots that take the highest logit exchange one word
/// a rank; the logits of others are put side by side first. All ranks choose what prepare(SampleArgs) chooses among the
/// whole rows. All of it is device memory, but for what SampleArgs says.
struct RankChoiceArgs {
  /// The settings are the same on all ranks.
  SampleArgs choice;
  ConstAnyView<2> part;  // (slots, vocab / ranks): this rank's logits
  /// (slots, vocab), in the place of `choice.logits`: the rows of slots whose logits were put side by side are written.
  AnyView<2> logits;
};

/// Adds the launch, an exchange of all ranks. Refuses what check(SampleArgs) refuses; a list whose context is no rank's; a
/// part of another size than the ranks' share, whose rows are no multiple of 16 bytes, or that is not in the device's
/// memory; and more slots, or logits, than the ranks can exchange.
Status prepare(const RankChoiceArgs&, LaunchList&);

}  // namespace cf::cuda
