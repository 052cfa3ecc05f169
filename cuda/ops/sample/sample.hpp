#pragma once
// The sampler. cpu_ref/sample.hpp says what it chooses; equal logits, widened to float32, get equal tokens.
#include <cstdint>

#include "core/host_device.hpp"
#include "core/sampling.hpp"
#include "core/view.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// How a slot's next token is chosen. Lies in device memory.
struct SlotSampling {
  SamplingRule rule;       // of valid settings: Sampling::rule()
  std::uint64_t sequence;  // the caller's number of the sequence
  std::int32_t chooses;    // 0: the slot holds no sequence, and nothing of it is read or written
  std::int32_t penalises;  // whether the rule has a repetition penalty other than 1: `seen` is read and written
};

/// What a slot chooses where cpu_ref::sample() refuses its logits or its position: a logit is NaN or +infinity, a score
/// lies beyond float32, all are -infinity, or the position is negative.
inline constexpr std::int32_t kNoToken = -1;

/// The number of 32-bit words in a bitmap that has one bit for each id.
constexpr std::int64_t seen_words(std::int64_t vocab_size) { return (vocab_size + 31) / 32; }

/// Where the logits and the settings of all slots lie, and where their tokens go. All of it is device memory.
struct SampleArgs {
  ConstAnyView<2> logits;         // (slots, vocab), float16, bfloat16 or float32
  const SlotSampling* settings;   // (slots)
  const std::int32_t* positions;  // (slots): the position of the chosen token
  /// (slots, seen_words(vocab)): bit id % 32 of word id / 32 says that the prompt or the output has the id. A slot that
  /// penalises sets the bit of the id that it chooses.
  std::uint32_t* seen;
  std::int32_t* chosen;          // (slots)
  std::int32_t* told = nullptr;  // (slots) in the host's memory, or null: the same, for a host that polls
};

/// Whether a slot's token is the one of the highest logit itself.
CF_HD inline bool takes_highest(const SlotSampling& s) {
  return s.rule.top_k == 1 && s.rule.temperature == 1 && s.penalises == 0;
}

/// Refuses, by name, what is null, misaligned or not in the device's memory, and a vocabulary outside 1 to
/// sampling::kMostTokens.
Status check(const SampleArgs&, const LaunchList&);
/// Adds the launch that chooses the tokens of all slots. Refuses what check() refuses.
/// A greedy slot reads its logits once. With cut-offs a slot reads them up to a dozen times, from the caches.
Status prepare(const SampleArgs&, LaunchList&);

}  // namespace cf::cuda
