#pragma once
// How a block chooses the token of one slot. Whatever is summed is an integer, so the sums do not depend on their order.
//   1. One pass finds the highest order key. Greedy slots end here.
//   2. top_k and top_p each find the lowest order key that they keep, by radix selection: a round sorts the candidates
//      into bins by a digit of their keys, and only the bin in which the cut-off lies has candidates in the next round.
//   3. The draw divides the ids among the warps, sums the kept weights of each part, and goes on with the part that the
//      target lies in, until that is one id.
#include <cstdint>

#include "core/sampling.hpp"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/sample/row.cuh"
#include "cuda/ops/sample/sample.hpp"

namespace cf::cuda::choice {

inline constexpr int kWarps = 32, kThreads = 32 * kWarps;
inline constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;
static_assert(kBins == 2 * kThreads);
inline constexpr int kIdBits = 32;  // the lower bits of an order key

using sampling::kRefusedKey;

/// What a block has in shared memory.
struct Shared {
  std::uint64_t warps[kWarps];  // a key or a sum of each warp
  /// The weights' sum and the number of tokens in each bin. The sum's halves are apart, since shared memory adds words
  /// of four bytes.
  std::uint32_t low[kBins], high[kBins], count[kBins];
  /// The bin that a cut-off lies in, its tokens, and what the bins above it sum to.
  struct {
    std::uint64_t above;
    std::uint32_t bin, count;
  } found;
};

__device__ inline int lane_index() { return int(threadIdx.x % 32); }
__device__ inline int warp_index() { return int(threadIdx.x / 32); }

/// A slot's logits and what makes them scores.
template <class T>
struct Row {
  const T* logits;
  std::int32_t vocab;
  const std::uint32_t* seen;  // null where the slot does not penalise
  float repetition_penalty, temperature;

  __device__ float score(float logit, std::int32_t id) const {
    const bool penalised = seen && (seen[unsigned(id) / 32] >> unsigned(id) % 32 & 1);
    return sampling::score(logit, penalised, repetition_penalty, temperature);
  }

  /// Calls f(score, id) for the ids first, first + stride and so on below `end`.
  template <class F>
  __device__ void for_each_score(int first, int end, int stride, F f) const {
    constexpr int in_flight = 4;
    for (; first < end; first += in_flight * stride) {
      T x[in_flight];
#pragma unroll
      for (int i = 0; i < in_flight; ++i)
        if (const int id = first + i * stride; id < end) x[i] = logits[id];
#pragma unroll
      for (int i = 0; i < in_flight; ++i)
        if (const int id = first + i * stride; id < end) f(score(to_float(x[i]), id), id);
    }
  }
};

/// The highest order key of a row, in all threads; kRefusedKey where a score is NaN or +infinity, 0 where all are
/// -infinity. Plain: a score is the logit itself.
template <bool kPlain, class T>
__device__ std::uint64_t highest_key(Shared& s, const Row<T>& row) {
  float highest = -INFINITY;
  std::int32_t highest_id = 0;
  bool refused = false;
  // Scores take many more registers than logits.
  for_each_logit<kThreads, kPlain ? 8 : 2>(row.logits, row.vocab, [&](float logit, std::int32_t id) {
    const float score = kPlain ? logit : row.score(logit, id);
    refused |= !(score < INFINITY);
    // The thread's ids ascend: it keeps the lowest one of equal scores.
    if (score > highest) {
      highest = score;
      highest_id = id;
    }
  });
  const std::uint64_t key = refused ? kRefusedKey : highest > -INFINITY ? sampling::order_key(highest, highest_id) : 0;
  const std::uint64_t of_warp = warp_max(key);
  if (lane_index() == 0) s.warps[warp_index()] = of_warp;
  __syncthreads();
  return warp_max(s.warps[lane_index()]);
}

/// Adds a token to its bin.
template <bool kWeights>
__device__ void add_to_bin(Shared& s, std::uint32_t bin, std::uint64_t weight) {
  if constexpr (kWeights) {
    const auto low = std::uint32_t(weight);
    // Whichever addition overflows the lower half carries into the upper half, so the order of the additions does not
    // matter.
    const bool carry = atomicAdd(&s.low[bin], low) > ~low;
    atomicAdd(&s.high[bin], std::uint32_t(weight >> 32) + carry);
  }
  atomicAdd(&s.count[bin], 1u);
}

/// What a bin sums to: weights or tokens.
template <bool kWeights>
__device__ std::uint64_t amount_of(const Shared& s, int bin) {
  if constexpr (kWeights) return std::uint64_t(s.high[bin]) << 32 | s.low[bin];
  return s.count[bin];
}

/// The lowest order key that a cut-off keeps, of the tokens whose key is `floor` or more. top_p (kWeights) keeps the
/// fewest highest tokens whose weights reach kept_sum(). top_k keeps the top_k highest tokens; there must be as many.
/// The result may lie below the lowest kept token's own key. Between the two lie only keys of tokens whose weight is 0.
template <bool kWeights, class T>
__device__ std::uint64_t lowest_kept_key(Shared& s, const Row<T>& row, const SamplingRule& rule, float highest,
                                         std::uint64_t floor) {
  const int thread = int(threadIdx.x);
  std::uint64_t prefix = 0;                // the candidates' bits from `top` on; its lower bits are 0
  auto asked = std::uint64_t(rule.top_k);  // what the candidates must sum to
  for (int top = 64;;) {
    // A digit has bits of the score or bits of the id.
    const int bits = top > kIdBits ? min(kDigitBits, top - kIdBits) : min(kDigitBits, top), shift = top - bits;
    for (int bin = thread; bin < kBins; bin += kThreads) s.low[bin] = s.high[bin] = s.count[bin] = 0;
    __syncthreads();
    row.for_each_score(thread, row.vocab, kThreads, [&](float score, std::int32_t id) {
      const std::uint64_t key = sampling::order_key(score, id);
      if (key < floor || (top < 64 && (key ^ prefix) >> top != 0)) return;
      const std::uint64_t weight = kWeights ? sampling::weight(highest, score) : 1;
      if (weight != 0) add_to_bin<kWeights>(s, std::uint32_t(key >> shift) & ((1u << bits) - 1), weight);
    });
    __syncthreads();

    // Threads take two bins each, from the highest one down.
    const int upper = kBins - 1 - 2 * thread;
    const std::uint64_t in_upper = amount_of<kWeights>(s, upper),
                        in_both = in_upper + amount_of<kWeights>(s, upper - 1);
    const std::uint64_t of_lanes = warp_scan(in_both, lane_index());
    if (lane_index() == 31) s.warps[warp_index()] = of_lanes;
    __syncthreads();
    const std::uint64_t of_warps = warp_scan(s.warps[lane_index()], lane_index());
    if (kWeights && top == 64) asked = sampling::kept_sum(__shfl_sync(~0u, of_warps, 31), rule);
    const std::uint64_t of_warps_above = __shfl_sync(~0u, of_warps, (warp_index() + 31) % 32);
    const std::uint64_t sum = (warp_index() == 0 ? 0 : of_warps_above) + of_lanes, above = sum - in_both;
    if (above < asked && asked <= sum) {
      const bool lies_in_upper = asked <= above + in_upper;
      const int bin = lies_in_upper ? upper : upper - 1;
      s.found = {lies_in_upper ? above : above + in_upper, std::uint32_t(bin), s.count[bin]};
    }
    __syncthreads();

    prefix |= std::uint64_t(s.found.bin) << shift;
    asked -= s.found.above;
    // The whole bin is kept.
    if (s.found.count == 1 || (!kWeights && s.found.count == asked)) return max(prefix, floor);
    top = shift;
    if (top == kIdBits) {
      // The bits above those of the vocabulary's ids are 1 in every key.
      top = 32 - __clz(row.vocab - 1);
      prefix |= std::uint64_t(~0u) >> top << top;
    }
  }
}

/// Draws among the tokens whose key is `floor` or more and whose weight is that of min_p or more.
template <class T>
__device__ std::int32_t draw(Shared& s, const Row<T>& row, const SamplingRule& rule, float highest, std::uint64_t floor,
                             std::uint64_t random) {
  const std::uint64_t least_weight = rule.least_weight;
  std::uint64_t target = 0;
  for (int begin = 0, end = row.vocab;;) {
    const int part = (end - begin + kWarps - 1) / kWarps;
    const int first = begin + warp_index() * part;
    std::uint64_t sum = 0;
    row.for_each_score(first + lane_index(), min(first + part, end), 32, [&](float score, std::int32_t id) {
      if (sampling::order_key(score, id) < floor) return;
      const std::uint64_t weight = sampling::weight(highest, score);
      if (weight >= least_weight) sum += weight;
    });
    const std::uint64_t of_lanes = warp_scan(sum, lane_index());
    __syncthreads();  // every warp has read the sums of the round before
    if (lane_index() == 31) s.warps[warp_index()] = of_lanes;
    __syncthreads();
    const std::uint64_t of_warps = warp_scan(s.warps[lane_index()], lane_index());
    if (end - begin == row.vocab) target = sampling::target(random, __shfl_sync(~0u, of_warps, 31));
    const unsigned beyond = __ballot_sync(~0u, of_warps > target);
    if (beyond == 0) return kNoToken;  // settings that Sampling::rule() does not make: no token is kept
    const int chosen = __ffs(int(beyond)) - 1;
    const std::uint64_t before = __shfl_sync(~0u, of_warps, (chosen + 31) % 32);
    if (chosen > 0) target -= before;
    begin += chosen * part;
    end = min(begin + part, end);
    if (end - begin == 1) return begin;
  }
}

template <class T>
__device__ std::int32_t choose(Shared& s, const Row<T>& row, const SlotSampling& slot, std::int32_t position) {
  const SamplingRule& rule = slot.rule;
  const bool plain = !row.seen && row.temperature == 1;
  const std::uint64_t highest = plain ? highest_key<true>(s, row) : highest_key<false>(s, row);
  if (highest == 0 || highest == kRefusedKey || position < 0 || rule.top_k < 1) return kNoToken;
  const std::int32_t highest_id = sampling::id_of(highest);
  if (rule.top_k == 1) return highest_id;

  const float highest_score = row.score(to_float(row.logits[highest_id]), highest_id);
  std::uint64_t floor = 0;
  if (rule.top_k < row.vocab) floor = lowest_kept_key<false>(s, row, rule, highest_score, floor);
  if (rule.top_p_rest != 0) floor = lowest_kept_key<true>(s, row, rule, highest_score, floor);
  return draw(s, row, rule, highest_score, floor,
              sampling::random_bits(rule.seed, slot.sequence, std::uint64_t(position)));
}

/// Where a slot's ids are remembered; null where it does not penalise.
__device__ inline std::uint32_t* seen_of(const SampleArgs& a, long slot) {
  return a.settings[slot].penalises ? a.seen + slot * seen_words(a.logits.shape[1]) : nullptr;
}

/// A slot's row of logits.
template <class T>
__device__ Row<T> row_of(const SampleArgs& a, long slot) {
  const long vocab = a.logits.shape[1];
  const SamplingRule& rule = a.settings[slot].rule;
  return {.logits = static_cast<const T*>(a.logits.data) + slot * vocab,
          .vocab = std::int32_t(vocab),
          .seen = seen_of(a, slot),
          .repetition_penalty = rule.repetition_penalty,
          .temperature = rule.temperature};
}

/// Tells a slot's choice. Every thread of the block has read `seen`: one of them calls this.
__device__ inline void tell(const SampleArgs& a, long slot, std::int32_t chosen) {
  a.chosen[slot] = chosen;
  if (a.told) store_for_host(reinterpret_cast<std::uint32_t*>(a.told + slot), std::uint32_t(chosen));
  if (std::uint32_t* const seen = seen_of(a, slot); seen && chosen != kNoToken)
    seen[unsigned(chosen) / 32] |= 1u << unsigned(chosen) % 32;
}

}  // namespace cf::cuda::choice
